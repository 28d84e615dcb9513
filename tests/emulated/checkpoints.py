"""Checkpoints of zeros, in files that take no room on the disk."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import torch
from torchtune.models.convert_weights import tune_to_hf
from torchtune.modules import TransformerDecoder


def write_zeros(folder: Path, model: TransformerDecoder) -> None:
    """Write a checkpoint in Hugging Face's format, as sparse as zeros are; of ``model`` only the shapes count."""
    attention = model.layers[0].attn
    width = model.tok_embeddings.weight.shape[1]
    empty = {name: torch.empty(w.shape, dtype=torch.bfloat16, device="meta") for name, w in model.state_dict().items()}
    weights = tune_to_hf(
        empty, num_heads=attention.num_heads, num_kv_heads=attention.num_kv_heads, dim=width,
        head_dim=attention.head_dim,
    )  # fmt: skip
    header, at = {}, 0
    for name, weight in weights.items():
        header[name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [at, at + weight.nbytes]}
        at += weight.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    folder.mkdir(parents=True)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    about = {"hidden_size": width, "num_attention_heads": attention.num_heads, "model_type": "llama"}
    about |= {"num_key_value_heads": attention.num_kv_heads, "vocab_size": model.tok_embeddings.weight.shape[0]}
    (folder / "config.json").write_text(json.dumps(about))
