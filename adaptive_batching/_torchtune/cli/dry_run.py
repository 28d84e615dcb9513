"""A recipe's command for a dry run, of which weights, tokenizer and data need not be there."""

from __future__ import annotations

import json
import math
import runpy
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from omegaconf import DictConfig, OmegaConf
from torchtune import config as torchtune_config
from torchtune.modules.peft import get_adapter_state_dict
from torchtune.training import FullModelTorchTuneCheckpointer

from adaptive_batching._torchtune.names import register
from adaptive_batching._torchtune.plan import meta_setup
from adaptive_batching._torchtune.plan.plan_command import load_config
from adaptive_batching._torchtune.stock import stand_ins
from adaptive_batching._torchtune.stock.data import Sample
from adaptive_batching._values import ConfigError

SAMPLES = 2**15
"""Of the data that stand in: more than the steps of a dry run take, and enough for a probe."""

_HERE = "adaptive_batching._torchtune.cli.dry_run"  # which runs as a program
_FILE = "model.safetensors"
# Key of a checkpointer -> that of its model, the first of these that a config has
_LOADED = {
    "checkpointer": ("model", "policy_model"), "ref_checkpointer": ("model",),
    "teacher_checkpointer": ("teacher_model",), "ref_policy_checkpointer": ("policy_model",),
    "value_checkpointer": ("reward_and_value_model",), "reward_checkpointer": ("reward_and_value_model",),
}  # fmt: skip
_RECIPES = (*meta_setup.RECIPES, "ppo_full_finetune_single_device")


class Tokenizer:
    """As much of a tokenizer as a recipe asks for, which takes any arguments."""

    pad_id, eos_id = 0, 2
    stop_tokens = (eos_id,)

    def __init__(self, max_seq_len: int | None = None, **ignored: Any) -> None:
        self.max_seq_len = max_seq_len


class Checkpointer(FullModelTorchTuneCheckpointer):
    """Loads zeros in torchtune's own format, of a model that may be larger than the host's memory."""

    def load_checkpoint(self) -> dict[str, Any]:
        """Load through a mapping that is shared with the file: Linux grants no private one larger than the memory."""
        from_file: Any = torch.UntypedStorage.from_file

        def shared(filename: str, shared: bool = False, nbytes: int = 0) -> Any:
            return from_file(filename, True, nbytes)

        with mock.patch.object(torch.UntypedStorage, "from_file", shared):
            loaded: dict[str, Any] = super().load_checkpoint()
        return loaded


def main(recipe: str, config: str, overrides: Sequence[str], folder: Path, devices: int, length: int | None) -> None:
    """Run a recipe on stand-ins, which are written to ``folder``.

    Args:
        recipe: Its name.
        config: Its name or path.
        overrides: As after ``run``.
        folder: For the config, checkpoints of zeros, and what the run writes.
        devices: To train on.
        length: Tokens of each sample; None for the ``max_seq_len`` of the tokenizer.

    Raises:
        ConfigError: If no length is known, or if stand-ins are not enough.
    """
    if recipe not in _RECIPES:
        raise ConfigError(f"{recipe}: a dry run knows what data to make for {', '.join(_RECIPES)}")
    _, _, cfg = load_config(config, recipe, overrides)
    length = length or cfg.tokenizer.get("max_seq_len")
    if length is None:
        raise ConfigError("tokenizer.max_seq_len is null, so the length of samples is unknown; give --sequence-length")
    OmegaConf.set_struct(cfg, False)
    stand_in(cfg, recipe, int(length), folder, SAMPLES)
    load_zeros(cfg, folder / "weights")
    file = folder / "config.yaml"
    OmegaConf.save(cfg, file)
    launched = ["--nproc_per_node", str(devices)] if devices > 1 else []
    sys.argv = ["adaptive-batching", "run", *launched, recipe, "--config", str(file)]
    runpy.run_module("adaptive_batching", run_name="__main__")


@dataclass(frozen=True)
class _Data(meta_setup.Data):
    """Samples of one length, each with an image where there is one."""

    image: stand_ins.Image | None = None

    def __getitem__(self, index: int) -> Sample:
        sample = super().__getitem__(index)
        return sample if self.image is None else sample | self.image.fields(self.length)


def make_data(tokenizer: Any, *, image: dict[str, int] | None = None, **fields: Any) -> meta_setup.Data:
    """Stand in for a builder of data sets."""
    return _Data(image=None if image is None else stand_ins.Image(**image), **fields)


def stand_in(cfg: DictConfig, recipe: str, length: int, folder: Path, samples: int) -> None:
    """Have a config train on samples of one length, and write to ``folder``."""
    packed = [bool(dataset.get("packed", False)) for dataset in (cfg.dataset,) if isinstance(dataset, DictConfig)]
    image = stand_ins.image_of(_on_paper(cfg.model)) if "model" in cfg else None
    data = {
        "_component_": f"{_HERE}.make_data", "length": length, "samples": samples,
        "packed": any(packed), "pairs": "dpo" in recipe, "image": None if image is None else asdict(image),
    }  # fmt: skip
    cfg.dataset = data
    if cfg.get("dataset_val") is not None:
        cfg.dataset_val = {**data, "samples": 2 * int(cfg.batch_size)}
    cfg.tokenizer = {"_component_": f"{_HERE}.Tokenizer", "max_seq_len": length}
    cfg.output_dir = str(folder / "out")
    cfg.metric_logger = {
        "_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": str(folder / "logs"),
    }  # fmt: skip
    cfg.resume_from_checkpoint = False
    cfg.pop("profiler", None)


def load_zeros(cfg: DictConfig, folder: Path) -> None:
    """Have the checkpointers of a config load zeros, in torchtune's own format; write them where they are not there."""
    for key, models in _LOADED.items():
        if key not in cfg:
            continue
        model = next(key for key in models if key in cfg)
        at = folder / model
        if not (at / _FILE).exists():
            module = _on_paper(cfg[model])
            with mock.patch.object(torch.Tensor, "cpu", lambda tensor: tensor):  # where quantized ones are moved to
                states = module.state_dict()
            adapters = get_adapter_state_dict(states, device="meta")
            write_zeros(at / _FILE, {name: value.shape for name, value in states.items() if name not in adapters})
        cfg[key] = {
            "_component_": f"{_HERE}.Checkpointer", "checkpoint_dir": str(at),
            "checkpoint_files": [_FILE], "recipe_checkpoint": None, "output_dir": cfg.output_dir,
            "model_type": cfg[key]["model_type"],
        }  # fmt: skip


def _on_paper(model: DictConfig) -> Any:
    with torch.device("meta"):
        return torchtune_config.instantiate(model)


def write_zeros(file: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    """Write weights of zeros in bfloat16 as safetensors: a file without blocks, which takes no disk."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        at, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        out.truncate(8 + len(text) + end)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    register()
    try:
        with stand_ins.without_torchvision():
            main(**{**given, "folder": Path(given["folder"])})
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
