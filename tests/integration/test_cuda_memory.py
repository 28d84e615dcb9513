"""What recipes take of a CUDA device, and how often they wait for it. ``make test-cuda`` runs these on a GPU, and
``make test-emulated`` on the emulated device, where losses are zero: only counts and bytes are compared there.

All of them together take a few minutes; each stands alone, so that what has run when time is up counts.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from adaptive_batching import AdaptiveStep
from adaptive_batching._ranks.fsdp import why_not_drained
from adaptive_batching._torchtune.ppo.stock_ppo import Experience
from tests.conftest import TuneRun, assert_close
from tests.integration.one_rank import differences_on
from tests.support.overrides import RECOVER, SGD, VALIDATE
from tests.support.ppo import ppo_run
from tests.support.ranks import run_ranks
from tests.support.records import events

pytestmark = pytest.mark.cuda
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="runs where there is no CUDA device")

CUDA = [
    "device=cuda", "tokenizer.max_seq_len=512", "dataset.split=train[:2000]", "epochs=1", "log_peak_memory_stats=False",
]  # fmt: skip
LIMIT = ["use_maximum_batch_size=True", "adaptive_batching.memory_limit=2GiB"]
EXACT = "adaptive_batching.round_to_power_of_two=False"
OFFLOAD = ["enable_activation_checkpointing=True", "enable_activation_offloading=True"]


@on_cuda
@pytest.mark.parametrize(
    ("kind", "fields", "share", "most"),
    [
        ("full", ["batch_size=64", "max_steps_per_epoch=10"], 0.6, 10),
        ("lora", ["batch_size=64", "max_steps_per_epoch=10"], 0.6, 10),
        ("full", [*OFFLOAD, "batch_size=96", "max_steps_per_epoch=6"], 0.7, 3),  # what was offloaded is in nobody's way
    ],
)
def test_a_step_that_runs_out_of_memory_on_the_device_loses_and_repeats_nothing(
    kind: str, fields: list[str], share: float, most: int, tune_run: TuneRun
) -> None:
    torch.cuda.reset_peak_memory_stats()
    free = tune_run(kind, *CUDA, *SGD, *fields, name="free")
    allowed = share * torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.mem_get_info()[1])
    try:
        limited = tune_run(kind, *CUDA, *SGD, *fields, *RECOVER, name="limited")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert 1 <= limited.metrics[-1]["oom_retries"] <= most
    assert_close(limited, free, epoch=0)


@on_cuda
@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_answer_fits_and_one_sample_more_does_not(kind: str, dtype: str, tune_run: TuneRun) -> None:
    retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    run = tune_run(kind, *CUDA, *LIMIT, EXACT, f"dtype={dtype}", "max_steps_per_epoch=20")
    [probe] = events(run, "probe")
    assert (probe["search"], probe["reason"]) == ("predict", "memory")
    sizes = {m["batch_size"]: m for m in probe["measurements"]}
    answer = sizes[probe["batch_size"]]
    assert answer["fits"] and answer["steps"] == 3 and answer["step_retries"][1:] == [0, 0]
    assert not sizes.get(probe["batch_size"] + 1, {"fits": False})["fits"]
    assert 0.8 * probe["budget_bytes"] < answer["peak_bytes"] <= probe["budget_bytes"], "as reserved"
    # Two that the curve leads to, and where blocks that no step can use are not foreseen, a bracket of 8 sizes.
    assert len(sizes) <= 6
    assert sum(m["peak_bytes"] is None for m in probe["measurements"]) <= 3
    assert run.metrics[-1]["oom_retries"] == 0
    in_training = torch.cuda.memory_stats().get("num_alloc_retries", 0) - retries
    assert in_training <= sum(m["retries"] for m in probe["measurements"]) + 1


@on_cuda
def test_a_validation_leaves_training_and_its_peaks_of_memory_alone(tune_run: TuneRun) -> None:
    common = [*SGD, *(each for each in CUDA if "peak" not in each), "log_peak_memory_stats=True", "log_every_n_steps=2"]
    common += ["max_steps_per_epoch=8", "cudnn_deterministic_mode=True"]
    weight = torch.ones(8, 8, device="cuda", requires_grad=True)
    (weight @ weight).sum().backward()  # makes the workspaces of cuBLAS, which would come late in the first run alone
    without = tune_run("full", *common, name="without")
    validated = tune_run("full", *common, *VALIDATE, "run_val_every_n_steps=3", "batch_size_val=64", name="validated")
    training = [step for step in validated.metrics if "val_loss" not in step]
    assert len(validated.metrics) == len(training) + 2
    for ours, theirs in zip(training, without.metrics, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)  # not every kernel is deterministic
        for name in ("peak_memory_active", "peak_memory_alloc"):
            assert ours[name] == pytest.approx(theirs[name], rel=0.01), name


@on_cuda
@pytest.mark.wide
@pytest.mark.parametrize("way", ["probed", "split"])
def test_packed_data_under_flex_attention_keep_to_few_sizes(
    way: str, tune_run: TuneRun, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "adaptive_batching")
    monkeypatch.setattr(torch._dynamo.config, "fail_on_recompile_limit_hit", True)
    common = [*CUDA, "dataset.packed=True", "max_steps_per_epoch=5"]
    settings = [*LIMIT, EXACT] if way == "probed" else ["micro_batch_size=auto", "batch_size=24", LIMIT[1]]
    run = tune_run("full", *common, *settings)
    [probe] = events(run, "probe")
    assert len(probe["measurements"]) <= 9  # each is compiled, and takes a little more or less than the one before
    assert run.metrics


def waits(run: Callable[[], object]) -> int:
    """Return how often ``run`` makes the host wait for the device, as torch reports it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


@pytest.mark.wide
@on_cuda
def test_no_micro_batch_of_ppo_waits_for_the_device(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Experience.counts  # where nothing is computed, there are no tokens to divide by
    monkeypatch.setattr(Experience, "counts", lambda self: [[max(n, 1) for n in each] for each in real(self)])

    def in_rollouts(rollouts: int, *fields: str, stock: bool = False) -> int:
        directory = tmp_path / f"{rollouts}_{len(fields)}_{stock}"
        arguments = ["device=cuda", "batch_size=8", "ppo_batch_size=4", f"num_steps={8 * rollouts}", *fields]
        arguments += ["enable_kv_cache=False", "stop_token_ids=[2]"]  # so that what runs does not hang on values
        return waits(lambda: ppo_run(inputs, directory, *arguments, stock=stock))

    theirs = in_rollouts(3, stock=True) - in_rollouts(1, stock=True)
    ours = in_rollouts(3, *RECOVER) - in_rollouts(1, *RECOVER)
    split = in_rollouts(3, "micro_batch_size=1") - in_rollouts(1, "micro_batch_size=1")
    print("PPO", theirs, ours, split)
    orders = 2 * 2  # of two rollouts, in two epochs each, which the host reads
    assert ours <= theirs + orders + 2, "and the loss of each rollout"
    assert split <= ours


@on_cuda
@pytest.mark.parametrize("max_tokens", [None, 2])
def test_a_step_of_a_plain_loop_does_not_wait_for_the_device(max_tokens: int | None) -> None:
    model = nn.Linear(8, 4, device="cuda")

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
        inputs, targets = batch
        return nn.functional.cross_entropy(model(inputs), targets, reduction="sum"), len(targets)

    step: AdaptiveStep[tuple[torch.Tensor, int]] = AdaptiveStep(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss
    )
    step.max_tokens = max_tokens
    samples = [(torch.ones(8), number % 4) for number in range(8)]
    step(samples)  # finds out that the batch can be split
    assert waits(lambda: step(samples)) == 0


@pytest.mark.skipif(bool(why_not_drained()), reason=why_not_drained())
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=without_cuda), pytest.param("cuda", marks=on_cuda)])
def test_a_sharded_model_on_one_rank_recovers_whatever_breaks_off(device: str, tmp_path: Path) -> None:
    """With one rank there is nothing to drain; that several do not hang is tested on the cpu, with gloo."""
    [differences] = run_ranks(differences_on, device, folder=tmp_path, size=1, forks=device == "cpu")
    assert len(differences) == 6
    assert max(differences.values()) <= (0.0 if device == "cpu" else 1e-5), differences
