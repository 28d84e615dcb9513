"""The recipes on a GPU: real out-of-memory errors of the caching allocator."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import TuneRun, assert_close, assert_same_weights
from tests.integration.one_target import NOISE
from tests.integration.test_growth import SGD
from tests.integration.test_probe import events, without_sizes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CUDA = [
    "device=cuda",
    "tokenizer.max_seq_len=512",
    "dataset.split=train[:2000]",
    "epochs=1",
    "log_peak_memory_stats=False",
]


@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_answer_fits_and_one_sample_more_does_not(kind: str, dtype: str, tune_run: TuneRun) -> None:
    limit = ["use_maximum_batch_size=True", "adaptive_batching.memory_limit=2GiB"]
    exact = "adaptive_batching.round_to_power_of_two=False"
    run = tune_run(kind, *CUDA, *limit, exact, f"dtype={dtype}", "max_steps_per_epoch=20")
    [probe] = events(run, "probe")
    assert (probe["search"], probe["reason"]) == ("predict", "memory")
    sizes = {m["batch_size"]: m["fits"] for m in probe["measurements"]}
    assert sizes[probe["batch_size"]] and not sizes[probe["batch_size"] + 1]
    assert (
        probe["budget_bytes"] * 0.8 < max(m["peak_bytes"] or 0 for m in probe["measurements"]) <= probe["budget_bytes"]
    )
    assert len(sizes) <= 5
    assert run.metrics


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_the_probe_leaves_no_trace_on_the_device(kind: str, tune_run: TuneRun) -> None:
    bound = ["use_maximum_batch_size=True", "adaptive_batching.memory_limit=2GiB", "adaptive_batching.max_batch_size=4"]
    few = [*CUDA, "max_steps_per_epoch=10", "cudnn_deterministic_mode=True"]
    stock = tune_run(kind, *few, name="stock", stock=True)
    off = tune_run(kind, *few, name="off")
    probed = tune_run(kind, *few, *bound, name="probed")
    assert off.metrics == stock.metrics
    assert without_sizes(probed.metrics) == stock.metrics
    assert_same_weights(probed.weights(epoch=0), stock.weights(epoch=0))


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_step_that_runs_out_of_memory_on_the_device_loses_and_repeats_nothing(kind: str, tune_run: TuneRun) -> None:
    common = [*CUDA, *SGD, "batch_size=64", "max_steps_per_epoch=10"]
    torch.cuda.reset_peak_memory_stats()
    free = tune_run(kind, *common, name="free")
    allowed = 0.6 * torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.mem_get_info()[1])
    try:
        limited = tune_run(kind, *common, name="limited")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert limited.metrics[-1]["out_of_memory_recoveries"] >= 1
    assert_close(limited, free, epoch=0)


def test_cutting_by_length_on_the_device_trains_as_the_whole_batch(tune_run: TuneRun) -> None:
    common = [*CUDA, *SGD, "batch_size=16", "gradient_accumulation_steps=2", "max_steps_per_epoch=10"]
    whole = tune_run("full", *common, name="whole")
    cut = tune_run("full", *common, "micro_batch_size=auto", "adaptive_batching.memory_limit=4GiB", name="cut")
    assert_close(cut, whole, epoch=0)


def test_the_noise_scale_on_the_device_is_that_on_the_cpu(tune_run: TuneRun) -> None:
    common = [*NOISE, "micro_batch_size=3", "batch_size=5"]
    data = {"dataset": {"_component_": "tests.integration.one_target.OneTarget"}}
    here = events(tune_run("full", *common, name="cpu", replaced=data), "noise")
    there = events(tune_run("full", *common, "device=cuda", name="cuda", replaced=data), "noise")
    assert [event["variance"] for event in there] == pytest.approx([event["variance"] for event in here], rel=1e-2)
