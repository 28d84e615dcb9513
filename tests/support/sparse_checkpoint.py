"""Checkpoints of zeros: files without blocks, so that one of any model is written at once and takes no disk."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torchtune import config
from torchtune.models.convert_weights import tune_to_hf
from torchtune.modules import TransformerDecoder
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
            with torch.device("meta"):
                made: Any = config.instantiate(cfg[model])
            adapters = get_adapter_params(made)
            _write(at / _FILE, {n: p.shape for n, p in made.named_parameters() if n not in adapters})
        cfg[key] = {
            "_component_": "torchtune.training.FullModelTorchTuneCheckpointer",
            "checkpoint_dir": str(at),
            "checkpoint_files": [_FILE],
            "recipe_checkpoint": None,
            "output_dir": cfg.output_dir,
            "model_type": cfg[key]["model_type"],
        }


def write_in_format_of_hugging_face(folder: Path, model: TransformerDecoder) -> None:
    """Write a checkpoint of zeros as Hugging Face's are; of ``model`` only the shapes count."""
    attention = model.layers[0].attn
    width = model.tok_embeddings.weight.shape[1]
    empty = {name: torch.empty(weight.shape, device="meta") for name, weight in model.state_dict().items()}
    weights = tune_to_hf(
        empty, num_heads=attention.num_heads, num_kv_heads=attention.num_kv_heads, dim=width,
        head_dim=attention.head_dim,
    )  # fmt: skip
    _write(folder / _FILE, {name: weight.shape for name, weight in weights.items()})
    about = {"hidden_size": width, "num_attention_heads": attention.num_heads, "model_type": "llama"}
    about |= {"num_key_value_heads": attention.num_kv_heads, "vocab_size": model.tok_embeddings.weight.shape[0]}
    (folder / "config.json").write_text(json.dumps(about))


def _write(file: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    """Write zeros in bfloat16: the length of the header, the header, and data that take no room."""
    header: dict[str, Any] = {}
    at = 0
    for name, shape in shapes.items():
        end = at + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        out.truncate(8 + len(text) + at)
