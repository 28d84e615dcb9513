"""The probe by the real allocator: what it answers trains on without a retry, and one sample more does not."""

from __future__ import annotations

import gc
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchtune
from omegaconf import OmegaConf

from adaptive_batching.torchtune import AdaptiveBatching, Watcher
from tests.support.wide import wide

GIB = 2**30
CONFIGS = Path(torchtune.__file__).parent.parent / "recipes" / "configs"
LEFT = {12: 11.1, 24: 22.9}  # of cards by their GiB, those that are left to training
ADAMW = {"_component_": "torch.optim.AdamW", "lr": 2e-5}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "LoRA": ("lora_finetune_single_device", "llama3_2/1B_lora_single_device", {}),
    "full": (
        "full_finetune_single_device", "llama3_2/1B_full_single_device",
        {"enable_activation_checkpointing": True, "optimizer_in_bwd": False, "optimizer": ADAMW},
    ),
}  # fmt: skip


@pytest.fixture
def segments(request: pytest.FixtureRequest) -> Iterator[None]:
    """The allocator's segments: fixed or expandable."""
    torch.cuda.memory._set_allocator_settings(f"expandable_segments:{request.param}")
    yield
    torch.cuda.memory._set_allocator_settings("expandable_segments:False")


class Trained(Watcher):
    """What a run has left behind: its probe, and by the allocator's own counters what each step took."""

    def __init__(self) -> None:
        self.probe: dict[str, Any] = {}  # event of the record
        self.retries: list[int] = []  # times that the allocator emptied its cache in each step
        self.reserved: list[int] = []  # most bytes that each step reserved
        self.recoveries = 0
        self._retries_before = torch.cuda.memory_stats()["num_alloc_retries"]
        torch.cuda.reset_peak_memory_stats()

    def step(self, epoch: int, step: int, samples: int, loss: float, lr: float, recoveries: int = 0) -> None:
        retries = torch.cuda.memory_stats()["num_alloc_retries"]
        self.retries.append(retries - self._retries_before)
        self.reserved.append(torch.cuda.max_memory_reserved())
        self.recoveries, self._retries_before = recoveries, retries


def train(kind: str, checkpoint: Path, output_dir: Path, **overrides: Any) -> Trained:
    """Run a kind of recipe for eight steps on samples of 1,024 tokens, without saving; overrides are keys."""
    recipe, config, settings = KINDS[kind]
    of_module = vars(importlib.import_module(f"recipes.{recipe}")).values()
    [ours] = [each for each in of_module if isinstance(each, type) and issubclass(each, AdaptiveBatching)]
    cfg: Any = OmegaConf.load(CONFIGS / f"{config}.yaml")
    cfg.output_dir, cfg.checkpointer.checkpoint_dir = str(output_dir), str(checkpoint)
    logger = "torchtune.training.metric_logging.DiskLogger"
    fields = {
        "tokenizer": {"_component_": "tests.emulated.samples.Tokenizer", "max_seq_len": 1024},
        "dataset": {"_component_": "tests.emulated.samples.Samples", "samples": 2000, "tokens": 1024},
        "metric_logger": {"_component_": logger, "log_dir": str(output_dir / "logs")},
        **dict(gradient_accumulation_steps=1, epochs=1, seed=1, log_peak_memory_stats=False, max_steps_per_epoch=8),
        **settings,
        **overrides,
    }
    for key, value in fields.items():
        OmegaConf.update(cfg, key, value, merge=False)
    ours.save_checkpoint = lambda self, *args, **named: None  # type: ignore[attr-defined]
    run = ours(cfg=cfg)
    try:
        run.setup(cfg=cfg)
        trained = Trained()
        run.watchers.append(trained)
        run.train()
    finally:
        run.cleanup()
        del run
        gc.collect()
        torch.cuda.empty_cache()
    record = [json.loads(line) for line in (output_dir / "adaptive_batching" / "report.jsonl").open()]
    trained.probe = next((event for event in record if event["event"] == "probe"), {})
    return trained


def probed(kind: str, llama: Path, folder: Path, **overrides: Any) -> Trained:
    """A run with the largest batch that fits."""
    exact = {"round_to_power_of_two": False, "memory_limit": int(LEFT[24] * GIB)}
    return train(kind, llama, folder, **{"use_maximum_batch_size": True, "adaptive_batching": exact, **overrides})


def within(kind: str, llama: Path, folder: Path, batch_size: int, limit: int, **overrides: Any) -> Trained:
    """A run with a batch of ``batch_size`` within ``limit`` bytes."""
    constant = {"_component_": "adaptive_batching.growth.constant"}
    fixed = {"memory_limit": limit, "max_batch_size": batch_size}
    fields = {"batch_increase_function": constant, "adaptive_batching": fixed, "batch_size": batch_size}
    return train(kind, llama, folder, **fields, **overrides)


@pytest.mark.parametrize(
    ("kind", "card", "segments"),
    [wide("LoRA", 12, False), ("full", 24, True)],
    indirect=["segments"],
)
def test_the_answer_trains_on_without_a_retry_and_one_sample_more_does_not(
    kind: str, card: int, segments: None, llama_1b: Path, tmp_path: Path
) -> None:
    exact = {"round_to_power_of_two": False, "memory_limit": int(LEFT[card] * GIB)}
    found = probed(kind, llama_1b, tmp_path / "probed", adaptive_batching=exact)
    assert found.probe["reason"] == "memory"
    answer, budget = found.probe["batch_size"], found.probe["budget_bytes"]
    assert len(found.probe["measurements"]) <= 9 and sum(m["steps"] for m in found.probe["measurements"]) <= 14
    assert not any(found.retries[2:]) and found.recoveries == 0 and max(found.reserved) <= budget
    more = within(kind, llama_1b, tmp_path / "more", answer + 1, budget)
    assert any(more.retries[2:]) or more.recoveries


def test_a_size_whose_first_step_alone_strains_the_allocator_is_taken(llama_1b: Path, tmp_path: Path) -> None:
    found = probed("LoRA", llama_1b, tmp_path, adaptive_batching={"memory_limit": int(LEFT[24] * GIB)})
    assert found.probe["batch_size"] == 8
    answer = [m for m in found.probe["measurements"] if m["batch_size"] == 8][-1]
    assert answer["step_retries"] == [1, 0, 0] and answer["step_peaks"][0] != answer["step_peaks"][2]


def test_what_is_probed_is_what_training_reserves_states_that_its_first_step_makes_included(
    llama_1b: Path, tmp_path: Path
) -> None:
    """Made before, with the cache empty, they would lie elsewhere: 15 % more would be reserved."""
    settings = {"batch_size": 2, "adaptive_batching": {"max_batch_size": 2}, "enable_activation_checkpointing": False}
    found = probed("full", llama_1b, tmp_path, **settings)
    answer = [m for m in found.probe["measurements"] if m["batch_size"] == 2][-1]
    assert answer["makes_states"] and answer["step_peaks"][1:] == [found.reserved[-1]] * 2


@pytest.mark.wide
def test_lengths_that_vary_strain_the_allocator_in_few_steps_at_the_answer(llama_1b: Path, tmp_path: Path) -> None:
    data = {"_component_": "tests.emulated.samples.Samples", "samples": 2000, "tokens": 1024, "varies": True}
    found = probed("LoRA", llama_1b, tmp_path / "probed", dataset=data)
    answer, budget = found.probe["batch_size"], found.probe["budget_bytes"]
    varied = within("LoRA", llama_1b, tmp_path / "varied", answer, budget, dataset=data, max_steps_per_epoch=30)
    assert sum(map(bool, varied.retries)) <= 3
    assert varied.recoveries <= 2, "a batch that is longer than those before meets a cache that was split for them"


def test_the_first_step_logs_what_training_took_and_not_the_probe(llama_1b: Path, tmp_path: Path) -> None:
    found = probed("LoRA", llama_1b, tmp_path, batch_size=2, log_peak_memory_stats=True, use_maximum_batch_size=False,
                   batch_increase_function={"_component_": "adaptive_batching.growth.constant"},
                   adaptive_batching={"memory_limit": 24 * GIB})  # fmt: skip
    assert found.probe["batch_size"] >= 4
    [log] = (tmp_path / "logs").glob("*.txt")
    logged = [float(each) for each in re.findall(r"peak_memory_reserved:([\d.]+)", log.read_text())]
    assert logged[0] < 0.7 * found.probe["budget_bytes"] / GIB and logged[0] == pytest.approx(logged[-1], rel=0.02)
