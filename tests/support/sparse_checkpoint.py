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
    """Have the checkpointers of a config load zeros, in torchtune's own format; write them where they are not there."""
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
            "_component_": "torchtune.training.FullModelTorchTuneCheckpointer", "checkpoint_dir": str(at),
            "checkpoint_files": [_FILE], "recipe_checkpoint": None, "output_dir": cfg.output_dir,
            "model_type": cfg[key]["model_type"],
        }  # fmt: skip


def write_in_format_of_hugging_face(folder: Path, model: TransformerDecoder) -> None:
    """Write a checkpoint of zeros as Hugging Face's are; of ``model`` only the shapes count."""
    attention, (vocabulary, width) = model.layers[0].attn, model.tok_embeddings.weight.shape
    heads, kv_heads = attention.num_heads, attention.num_kv_heads
    empty = {name: torch.empty(weight.shape, device="meta") for name, weight in model.state_dict().items()}
    weights = tune_to_hf(empty, num_heads=heads, num_kv_heads=kv_heads, dim=width, head_dim=attention.head_dim)
    _write(folder / _FILE, {name: weight.shape for name, weight in weights.items()})
    about = {"hidden_size": width, "num_attention_heads": heads, "model_type": "llama"}
    about |= {"num_key_value_heads": kv_heads, "vocab_size": vocabulary}
    (folder / "config.json").write_text(json.dumps(about))


def _write(file: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    """Write zeros in bfloat16: the length of the header, the header, and data that take no room."""
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
