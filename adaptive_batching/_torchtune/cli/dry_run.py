"""A recipe's command for a dry run, of which weights, tokenizer and data need not be there."""

from __future__ import annotations

import json
import math
import os
import runpy
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from omegaconf import DictConfig, ListConfig, OmegaConf
from torchtune import config as torchtune_config
from torchtune.config._errors import InstantiationError
from torchtune.modules.peft import get_adapter_state_dict
from torchtune.training import FullModelTorchTuneCheckpointer

from adaptive_batching._mistakes import end
from adaptive_batching._ranks.agree import Ranks
from adaptive_batching._torchtune.cli.configs import read_config
from adaptive_batching._torchtune.names import REPORTED, config_files, register
from adaptive_batching._torchtune.recipe_classes import mixin_of
from adaptive_batching._torchtune.stock import images
from adaptive_batching._torchtune.stock.losses import ANSWERS
from adaptive_batching._torchtune.stock.on_paper import Data
from adaptive_batching._torchtune.train.stock_config import check_kinds, not_loaded, refused_in_one_line
from adaptive_batching._values import ConfigError, first_line

SAMPLES = 2**15
"""Of the data that stand in: more than the steps of a dry run take, and enough for a probe."""

_HERE = "adaptive_batching._torchtune.cli.dry_run"  # which runs as a program
_FILE = "model.safetensors"


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


def main(
    recipe: str, config: str, overrides: Sequence[str], folder: Path, devices: int, length: int | None,
    samples: int = SAMPLES, accumulation: int | None = None,
) -> None:  # fmt: skip
    """Run a recipe on stand-ins, which are written to ``folder``.

    Args:
        recipe: Its name.
        config: Its name or path.
        overrides: As after ``run``.
        folder: For the config, checkpoints of zeros, and what the run writes.
        devices: To train on.
        length: Tokens of each sample; None for the ``max_seq_len`` of the tokenizer, or else the longest sample.
        samples: Of the data that stand in, at most.
        accumulation: For a plan, which probes for the largest batch and trains with it: the batches that an optimizer
            step adds up, of which at most two run; None to run what the config says.

    Raises:
        ConfigError: If no length is known, or if stand-ins are not enough.
    """
    path = Path(config) if Path(config).is_file() else config_files()[config]
    cfg = read_config(path, overrides)
    check_kinds(cfg)
    loads = mixin_of(recipe).loads  # of stock's recipe, nothing is imported before its ranks are replaced
    if next(iter(loads.values())) not in cfg:
        raise ConfigError(f"{config} has no model; is it a config of a recipe?")
    OmegaConf.set_struct(cfg, False)
    lengths = None
    if accumulation is not None:
        length = length or (cfg.get("adaptive_batching") or {}).get("sequence_length")
    length = length or cfg.tokenizer.get("max_seq_len")
    if length is None:
        lengths = measure_samples(cfg)
        length = max(lengths)
    if accumulation is not None:
        in_a_step = accumulate_for_plan(cfg, accumulation)
        if lengths is not None:
            samples = max(min(samples, len(lengths) // accumulation * in_a_step), 1)
    reported = {"length": int(length), "samples": lengths and len(lengths), "tokens": lengths and sum(lengths)}
    (folder / REPORTED).write_text(json.dumps(reported))
    stand_in(cfg, recipe, int(length), folder, samples)
    load_zeros(cfg, loads, folder / "weights")
    file = folder / "config.yaml"
    OmegaConf.save(cfg, file)
    launched = []
    if devices > 1 and accumulation is None:
        launched = ["--nproc_per_node", str(devices)]
    elif devices > 1:
        be_one_of_alike_ranks(devices)
    sys.argv = ["adaptive-batching", "run", *launched, recipe, "--config", str(file)]
    runpy.run_module("adaptive_batching", run_name="__main__")


def accumulate_for_plan(cfg: DictConfig, accumulation: int) -> int:
    """Have a config probe for the largest batch of a forward pass, as its own settings of memory say, and train on it.

    Returns:
        The batches that an optimizer step adds up then. Two take as much memory as more, which take longer.
    """
    settings = cfg.get("adaptive_batching") or {}
    splits = cfg.get("micro_batch_size") is not None
    cfg.gradient_accumulation_steps = 2 if (accumulation > 1 or splits) and not cfg.get("optimizer_in_bwd") else 1
    cfg.use_maximum_batch_size, cfg.micro_batch_size, cfg.batch_increase_function = True, None, None
    of_memory = ("search", "max_batch_size", "memory_limit", "headroom")
    cfg.adaptive_batching = {
        "round_to_power_of_two": False, **{key: settings[key] for key in of_memory if key in settings}
    }  # fmt: skip
    return int(cfg.gradient_accumulation_steps)


def be_one_of_alike_ranks(count: int) -> None:
    """Make this process the first of so many ranks, of which it runs none but itself: all would do the same.

    Their group is torch's fake one, whose collectives return at once. What ranks would agree on is this one's view.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    own = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    os.environ.update({**own, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"})
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    dist.init_process_group = lambda *args, **kwargs: None  # by which stock would make another
    of_ranks: Any = Ranks
    of_ranks.connect, of_ranks.largest = lambda ranks: "", lambda ranks, value: value
    of_ranks.gather, of_ranks.on_first = lambda ranks, value: [value] * ranks.size, lambda ranks, function: function()


def measure_samples(cfg: DictConfig) -> list[int]:
    """Return the tokens of each sample of the data of a config, of a pair those of its longer answer.

    Raises:
        ConfigError: If tokenizer and data are not on this machine. What a hub has is looked for in its cache alone.
    """
    keys = ("tokens", *(f"{kind}_input_ids" for kind in ANSWERS))
    try:
        tokenizer = torchtune_config.instantiate(cfg.tokenizer)
        sources = cfg.dataset if isinstance(cfg.dataset, ListConfig) else [cfg.dataset]
        samples = [sample for source in sources for sample in torchtune_config.instantiate(source, tokenizer)]
        lengths = [max(len(sample[key]) for key in keys if key in sample) for sample in samples]
    except Exception as error:  # each format of tokenizers and data raises its own
        why = f"the data could not be read ({type(error).__name__}: {first_line(error)[:160]})"
        raise ConfigError(
            f"tokenizer.max_seq_len is null, so the length of samples is unknown, and {why}; give --sequence-length"
        ) from None
    if not lengths:
        raise ConfigError("the data set has no samples; give --sequence-length")
    return lengths


def make_data(tokenizer: Any, *, image: dict[str, int] | None = None, **fields: Any) -> Data:
    """Stand in for a builder of data sets."""
    return Data(image=None if image is None else images.Image(**image), **fields)


def stand_in(cfg: DictConfig, recipe: str, length: int, folder: Path, samples: int) -> None:
    """Have a config train on samples of one length, and write to ``folder``."""
    packed = [bool(dataset.get("packed", False)) for dataset in (cfg.dataset,) if isinstance(dataset, DictConfig)]
    model = _on_paper(cfg.model) if "model" in cfg else None
    image = None if model is None else images.image_of(model)
    most = int(getattr(model, "max_seq_len", length))
    if length > most:
        raise ConfigError(
            f"samples have {length} tokens, but the model takes at most {most}; set tokenizer.max_seq_len"
        )
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


def load_zeros(cfg: DictConfig, loads: Mapping[str, str], folder: Path) -> None:
    """Have the checkpointers of a config load zeros, in torchtune's own format; write them where they are not there.

    ``loads`` is that of the recipe's class.
    """
    for key, model in loads.items():
        if key not in cfg:
            continue
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
    try:
        register()
        with images.without_torchvision(), refused_in_one_line():
            main(**{**given, "folder": Path(given["folder"])})
    except InstantiationError as error:
        end(not_loaded(error))
    except ConfigError as error:
        end(str(error))
