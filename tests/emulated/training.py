"""Run one of our recipes, and say what its probe and its steps took.

    python -m tests.emulated.training <recipe> <config.yaml> [overrides]

The last line is JSON: ``probe``, as recorded, or null; ``steps``, of each optimizer step the most that was reserved and
allocated since the one before, and how often the allocator emptied its cache; ``recorded``, the peak that the record has
of each.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from adaptive_batching.torchtune import AdaptiveBatching, Watcher


class Peaks(Watcher):
    """What each step took, by the allocator's own counters."""

    def __init__(self) -> None:
        self.steps: list[dict[str, int]] = []
        self._retries = torch.cuda.memory_stats()["num_alloc_retries"]
        torch.cuda.reset_peak_memory_stats()

    def step(self, *told: Any, **named: Any) -> None:
        retries = torch.cuda.memory_stats()["num_alloc_retries"]
        peaks = {"reserved": torch.cuda.max_memory_reserved(), "allocated": torch.cuda.max_memory_allocated()}
        self.steps.append({**peaks, "retries": retries - self._retries})
        self._retries = retries
        torch.cuda.reset_peak_memory_stats()


def main(name: str, config: str, *overrides: str) -> dict[str, Any]:
    """Run the recipe, and return what the last line is to say."""
    module = importlib.import_module(f"recipes.{name}")
    [kind] = [
        each for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, AdaptiveBatching) and each.__module__ == module.__name__
    ]  # fmt: skip
    cfg = OmegaConf.merge(OmegaConf.load(config), OmegaConf.from_dotlist(list(overrides)))
    kind.save_checkpoint = lambda self, *args, **named: None  # type: ignore[attr-defined]
    recipe = kind(cfg=cfg)
    recipe.setup(cfg=cfg)
    peaks = Peaks()
    recipe.watchers.append(peaks)
    recipe.train()
    lines = (Path(cfg.output_dir) / "adaptive_batching" / "report.jsonl").read_text().splitlines()
    record = [json.loads(line) for line in lines]
    return {
        "probe": next((event for event in record if event["event"] == "probe"), None),
        "steps": peaks.steps,
        "recorded": [event["peak_bytes"] for event in record if event["event"] == "step"],
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])), flush=True)
    os._exit(0)
