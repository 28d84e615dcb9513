"""Checkpoints of zeros: files without blocks, so that one of any model is written at once and takes no disk."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torchtune.models.convert_weights import tune_to_hf
from torchtune.modules import TransformerDecoder

from adaptive_batching._torchtune.cli.dry_run import write_zeros

_FILE = "model.safetensors"


def write_in_format_of_hugging_face(folder: Path, model: TransformerDecoder) -> None:
    """Write a checkpoint of zeros as Hugging Face's are; of ``model`` only the shapes count."""
    attention, (vocabulary, width) = model.layers[0].attn, model.tok_embeddings.weight.shape
    heads, kv_heads = attention.num_heads, attention.num_kv_heads
    empty = {name: torch.empty(weight.shape, device="meta") for name, weight in model.state_dict().items()}
    weights = tune_to_hf(empty, num_heads=heads, num_kv_heads=kv_heads, dim=width, head_dim=attention.head_dim)
    write_zeros(folder / _FILE, {name: weight.shape for name, weight in weights.items()})
    about = {"hidden_size": width, "num_attention_heads": heads, "model_type": "llama"}
    about |= {"num_key_value_heads": kv_heads, "vocab_size": vocabulary}
    (folder / "config.json").write_text(json.dumps(about))
