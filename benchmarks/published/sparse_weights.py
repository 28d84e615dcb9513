"""Write checkpoints of zeros in Hugging Face's format: files without blocks, which take no disk."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def write_model(config: Any, folder: Path) -> None:
    """Write a model of `config` in bfloat16 to `folder`."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    header = {}
    end = 0
    for name, weight in model.named_parameters():
        at, end = end, end + 2 * weight.numel()
        header[name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [at, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    config.save_pretrained(folder)
