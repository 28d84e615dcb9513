"""A recipe's command for a dry run, of which weights, tokenizer and data need not be there."""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torchtune import config
from torchtune.modules.peft import get_adapter_params

import adaptive_batching.__main__
from adaptive_batching._torchtune import meta_setup
from adaptive_batching._torchtune.names import register
from adaptive_batching._torchtune.plan_command import load_config
from adaptive_batching._values import ConfigError

SAMPLES = 2**15
"""Of the data that stand in: more than the steps of a dry run take, and enough for a probe."""

_HERE = "adaptive_batching._torchtune.dry_run"  # which runs as a program
_FILE = "model.safetensors"
_LOADED = {"checkpointer": "model", "ref_checkpointer": "model", "teacher_checkpointer": "teacher_model"}


class Tokenizer:
    """As much of a tokenizer as a recipe asks for, which takes any arguments."""

    pad_id = 0

    def __init__(self, max_seq_len: int | None = None, **ignored: Any) -> None:
        self.max_seq_len = max_seq_len


def main(folder: Path, devices: int, length: int | None, command: Sequence[str]) -> None:
    """Run a recipe on stand-ins, which are written to ``folder``.

    Args:
        folder: For the config, checkpoints of zeros, and what the run writes.
        devices: To train on; more than one for a recipe of several.
        length: Tokens of each sample; None for the ``max_seq_len`` of the tokenizer.
        command: The recipe, ``--config`` with its config, and overrides, as after ``run``.

    Raises:
        ConfigError: If there is no such config, if no length is known, or if stand-ins are not enough.
    """
    recipe, name, overrides = _read(command)
    if recipe not in meta_setup.RECIPES:
        raise ConfigError(f"{recipe}: a dry run stands in for the data of {', '.join(meta_setup.RECIPES)}")
    if recipe.endswith("single_device") != (devices == 1):
        of = "one device" if devices > 1 else "2 or more"
        raise ConfigError(f"--devices {devices}: {recipe} trains on {of}; set another, or name another recipe")
    _, _, cfg = load_config(name, recipe, overrides)
    length = length or cfg.tokenizer.get("max_seq_len")
    if length is None:
        raise ConfigError("tokenizer.max_seq_len is null, so the length of samples is unknown; give --sequence-length")
    if "vision" in str(cfg.model.get("_component_")):
        raise ConfigError(f"{name}: models that take images are not covered; 'plan' answers for some")
    OmegaConf.set_struct(cfg, False)
    stand_in(cfg, recipe, int(length), folder)
    file = folder / "config.yaml"
    OmegaConf.save(cfg, file)
    launched = ["--nproc_per_node", str(devices)] if devices > 1 else []
    sys.argv = ["adaptive-batching", "run", *launched, recipe, "--config", str(file)]
    adaptive_batching.__main__.main()


def _read(command: Sequence[str]) -> tuple[str, str, list[str]]:
    """Return the recipe, the config and the overrides of a command."""
    recipe, *rest = command
    if "--config" not in rest[:-1]:
        raise ConfigError(f"--config <name or path> is missing after {recipe}")
    at = rest.index("--config")
    overrides = [*rest[:at], *rest[at + 2 :]]
    if wrong := [each for each in overrides if "=" not in each and not each.startswith("~")]:
        raise ConfigError(f"{wrong[0]!r} is not an override; write key=value")
    return recipe, rest[at + 1], overrides


def stand_in(cfg: DictConfig, recipe: str, length: int, folder: Path, samples: int = SAMPLES) -> None:
    """Have a config train on samples of one length, from weights of zeros, and write to ``folder``."""
    packed = [bool(each.get("packed", False)) for each in (cfg.dataset,) if isinstance(each, DictConfig)]
    data = {
        "_component_": f"{meta_setup.__name__}.make_data", "length": length, "samples": samples,
        "packed": any(packed), "pairs": "dpo" in recipe,
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
    load_zeros(cfg, folder / "weights")


def load_zeros(cfg: DictConfig, folder: Path) -> None:
    """Have the checkpointers of a config load zeros, in torchtune's own format; write them where they are not there."""
    for key, model in _LOADED.items():
        if key not in cfg:
            continue
        at = folder / model
        if not (at / _FILE).exists():
            with torch.device("meta"):
                made: Any = config.instantiate(cfg[model])
            adapters = get_adapter_params(made)
            write_zeros(at / _FILE, {n: p.shape for n, p in made.named_parameters() if n not in adapters})
        cfg[key] = {
            "_component_": "torchtune.training.FullModelTorchTuneCheckpointer", "checkpoint_dir": str(at),
            "checkpoint_files": [_FILE], "recipe_checkpoint": None, "output_dir": cfg.output_dir,
            "model_type": cfg[key]["model_type"],
        }  # fmt: skip


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
        main(Path(given["folder"]), given["devices"], given["length"], given["command"])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
