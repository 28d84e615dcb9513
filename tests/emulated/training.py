"""Runs of our recipes on the emulated device, with what the allocator says of each step."""

from __future__ import annotations

import gc
import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torchtune
from omegaconf import OmegaConf

from adaptive_batching.torchtune import AdaptiveBatching, Watcher

CONFIGS = Path(torchtune.__file__).parent.parent / "recipes" / "configs"


@dataclass(frozen=True)
class Trained:
    """What a run has left behind."""

    probe: dict[str, Any] | None
    """Event of the record, if there was a probe."""
    retries: list[int]
    """Times that the allocator emptied its cache in each step."""
    reserved: list[int]
    """Most bytes that each step reserved."""
    recoveries: int
    output_dir: Path


class Peaks(Watcher):
    """Notes what each step took, by the allocator's own counters."""

    def __init__(self) -> None:
        self.retries: list[int] = []
        self.reserved: list[int] = []
        self.recoveries = 0
        self._retries_before = torch.cuda.memory_stats()["num_alloc_retries"]
        torch.cuda.reset_peak_memory_stats()

    def step(self, epoch: int, step: int, samples: int, loss: float, lr: float, recoveries: int = 0) -> None:
        retries = torch.cuda.memory_stats()["num_alloc_retries"]
        self.retries.append(retries - self._retries_before)
        self.reserved.append(torch.cuda.max_memory_reserved())
        self.recoveries, self._retries_before = recoveries, retries


def train(recipe: str, config: str, checkpoint: Path, output_dir: Path, **overrides: Any) -> Trained:
    """Run ``recipe`` with torchtune's ``config`` on samples of 1,024 tokens, without saving.

    Args:
        recipe: Name of one of ours.
        config: Name of one of torchtune's.
        checkpoint: Folder of the model's.
        output_dir: Folder of the run.
        overrides: Keys of the config, two underscores for a dot.
    """
    module = importlib.import_module(f"recipes.{recipe}")
    [kind] = [
        each for each in vars(module).values() if isinstance(each, type) and issubclass(each, AdaptiveBatching)
    ]  # fmt: skip
    cfg: Any = OmegaConf.load(CONFIGS / f"{config}.yaml")
    settings = {
        "output_dir": str(output_dir),
        "checkpointer.checkpoint_dir": str(checkpoint),
        "tokenizer": {"_component_": "tests.emulated.samples.Tokenizer", "max_seq_len": 1024},
        "dataset": {"_component_": "tests.emulated.samples.Samples"},
        "metric_logger": {
            "_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": str(output_dir / "logs")
        },
        "gradient_accumulation_steps": 1,
        "epochs": 1,
        "seed": 1,
        "log_peak_memory_stats": False,
        **{key.replace("__", "."): value for key, value in overrides.items()},
    }  # fmt: skip
    for key, value in settings.items():
        OmegaConf.update(cfg, key, value, merge=False)
    kind.save_checkpoint = lambda self, *args, **named: None  # type: ignore[attr-defined]
    run, peaks = kind(cfg=cfg), None
    try:
        run.setup(cfg=cfg)
        peaks = Peaks()
        run.watchers.append(peaks)
        run.train()
    finally:
        run.cleanup()
        del run
        gc.collect()
        torch.cuda.empty_cache()
    record = [json.loads(line) for line in (output_dir / "adaptive_batching" / "report.jsonl").open()]
    probe = next((event for event in record if event["event"] == "probe"), None)
    return Trained(probe, peaks.retries, peaks.reserved, peaks.recoveries, output_dir)
