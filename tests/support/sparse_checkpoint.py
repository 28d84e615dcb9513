"""Checkpoints of zeros: files without blocks, so that one of any model is written at once and takes no disk."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torchtune import config
from torchtune.modules.peft import get_adapter_params

_FILE = "model.safetensors"
_LOADS = {"checkpointer": "model", "ref_checkpointer": "model", "teacher_checkpointer": "teacher_model"}


def load_zeros(cfg: DictConfig, folder: Path) -> None:
    """Have a config load checkpoints of zeros, in torchtune's own format, and write them into ``folder``.

    Args:
        cfg: The config of a recipe; each of its checkpointers is replaced.
        folder: Folders of checkpoints are made in it, or taken where they are there.
    """
    for key, model in _LOADS.items():
        if key not in cfg:
            continue
        at = folder / model
        if not (at / _FILE).exists():
            write_zeros(cfg[model], at / _FILE)
        cfg[key] = {
            "_component_": "torchtune.training.FullModelTorchTuneCheckpointer",
            "checkpoint_dir": str(at),
            "checkpoint_files": [_FILE],
            "recipe_checkpoint": None,
            "output_dir": cfg.output_dir,
            "model_type": cfg[key]["model_type"],
        }


def write_zeros(model: DictConfig, file: Path) -> int:
    """Write the weights of a component, its adapters left out, as bfloat16; return how many bytes they would take."""
    with torch.device("meta"):
        made: Any = config.instantiate(model)
    adapters = get_adapter_params(made)
    header: dict[str, Any] = {}
    at = 0
    for name, parameter in made.named_parameters():
        if name not in adapters:
            end = at + 2 * parameter.numel()
            header[name] = {"dtype": "BF16", "shape": list(parameter.shape), "data_offsets": [at, end]}
            at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as out:  # format: length of the header, header, data
        out.write(struct.pack("<Q", len(text)) + text)
        out.truncate(8 + len(text) + at)
    return at
