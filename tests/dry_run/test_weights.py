"""Weights that stand in for those of a recipe."""

from __future__ import annotations

import os
from pathlib import Path

from adaptive_batching._torchtune.cli.dry_run import Checkpointer, write_zeros


def test_weights_larger_than_the_hosts_memory_load(tmp_path: Path) -> None:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    weights = tmp_path / "weights"
    write_zeros(weights / "model.safetensors", {"weight": (memory_bytes,)})  # of two bytes each
    loader = Checkpointer(str(weights), ["model.safetensors"], "LLAMA3", output_dir=str(tmp_path / "out"))
    weight = loader.load_checkpoint()["model"]["weight"]
    assert weight.shape == (memory_bytes,) and not weight[::4096][:9].any()
