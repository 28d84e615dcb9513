"""Each setting of a run, ours and torchtune's, on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from tests.conftest import Run, TuneRun
from tests.support.device_steps import in_use
from tests.support.overrides import DOUBLE
from tests.support.records import events
from tests.support.wide import few

ON_DEVICE = ["device=cuda", "dtype=bf16", "dataset.split=train[:64]", "epochs=1"]
LIMIT = "adaptive_batching.memory_limit=1GiB"
PROBE = ["use_maximum_batch_size=True", LIMIT]
GROW = [*DOUBLE, "epochs=3", "batch_size=2"]


def sizes(run: Run) -> list[int]:
    return [int(step["batch_size"]) for step in run.metrics]


MIB = 2**20
GROWN = [2] * 32 + [4] * 16 + [8] * 8
EXPECTED: dict[str, tuple[list[str], Callable[[Run], Any], Any]] = {
    "auto": (["micro_batch_size=auto", LIMIT], sizes, [4] * 16),
    "explore": (["micro_batch_size=explore", LIMIT], lambda run: len(events(run, "exploration")), 1),
    "growth within memory": ([*GROW, *PROBE, "adaptive_batching.max_batch_size=8"], sizes, GROWN),
    "binary search": (
        [*PROBE, "adaptive_batching.search=binary_search", "adaptive_batching.max_batch_size=8"], sizes, [8] * 8
    ),
}  # fmt: skip


@pytest.mark.parametrize("setting", few(EXPECTED, "auto", "growth within memory"))
def test_a_setting_does_on_the_device_what_it_does_elsewhere(setting: str, tune_run: TuneRun) -> None:
    overrides, found, expected = EXPECTED[setting]
    assert found(tune_run("full", *ON_DEVICE, *overrides)) == expected


OF_TORCHTUNE = {
    "offloading": ["enable_activation_checkpointing=True", "enable_activation_offloading=True"],
    "in the backward pass": ["optimizer_in_bwd=True", "clip_grad_norm=null"],
    "packed": ["dataset.packed=True"],
    "paged": ["optimizer._component_=bitsandbytes.optim.PagedAdamW8bit"],
    "8 bits": ["optimizer._component_=bitsandbytes.optim.AdamW8bit"],
}


@pytest.mark.parametrize("setting", few(OF_TORCHTUNE, "offloading"))
def test_a_run_probes_and_trains_with_a_setting_of_torchtunes(setting: str, tune_run: TuneRun) -> None:
    bound = ["adaptive_batching.max_batch_size=8", "dataset.split=train[:400]", "max_steps_per_epoch=8"]
    run = tune_run("full", *ON_DEVICE, *PROBE, *bound, *OF_TORCHTUNE[setting])
    [probe] = events(run, "probe")
    assert (probe["search"], probe["batch_size"], probe["reason"]) == ("predict", 8, "max_batch_size=8")
    assert sizes(run) == [8] * len(run.metrics) and run.metrics
    assert in_use() == 0, "a run that has ended leaves nothing behind"


def test_growth_goes_on_beyond_what_fits_in_one_forward(tune_run: TuneRun) -> None:
    free, total = torch.cuda.mem_get_info()
    limit = f"adaptive_batching.memory_limit={total - free + 64 * MIB}"
    few = [*DOUBLE, "epochs=3", "batch_size=16", "use_maximum_batch_size=True", limit]
    run = tune_run(
        "full", *ON_DEVICE, *few, "adaptive_batching.max_batch_size=64", "adaptive_batching.grow_beyond_memory=True"
    )
    [probe] = events(run, "probe")
    assert probe["batch_size"] < 64 and probe["reason"] == "memory"
    assert sizes(run) == [16] * 4 + [32] * 2 + [64]


def test_a_compiled_run_runs_kernels_of_triton(tune_run: TuneRun, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    run_kernel = CachingAutotuner.run

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        launched.append(self.fn.__name__)
        return run_kernel(self, *args, **options)

    monkeypatch.setattr(CachingAutotuner, "run", noted)
    run = tune_run("lora", *ON_DEVICE, "max_steps_per_epoch=4", "compile=True")
    assert len(run.metrics) == 4
    assert any(name.startswith("triton_") for name in launched)
