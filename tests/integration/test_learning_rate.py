"""The learning rate of growing batches, within real recipes, run through ``tune run``."""

from __future__ import annotations

import pytest

from tests.conftest import Run, TuneRun
from tests.support.lr_schedules import SCHEDULES
from tests.support.wide import few

GROW = [
    "batch_increase_function._component_=adaptive_batching.growth.step",
    "batch_increase_function.every=0.5",
    "adaptive_batching.increase_every=0.5",
    "adaptive_batching.max_batch_size=16",
    "dataset.split=train[:64]",
    "epochs=3",
]
MAXIMUM = [
    "use_maximum_batch_size=True", "adaptive_batching.max_batch_size=16", "adaptive_batching.memory_limit=8GiB",
]  # fmt: skip


def by_samples(run: Run) -> dict[int, float]:
    """The rate after so many samples."""
    seen, rates = 0, {}
    for step in run.metrics:
        seen += int(step.get("global_batch_size", 4))
        rates[seen] = step["lr"]
    return rates


@pytest.mark.parametrize("name", few(["cosine in backward", "stepwise", "annealed", "none"], "cosine in backward"))
def test_the_rate_depends_on_the_samples_seen_alone_and_scaling_multiplies_it(name: str, tune_run: TuneRun) -> None:
    schedule = {"lr_scheduler": SCHEDULES[name.split()[0]]}
    how = ["optimizer_in_bwd=True", "clip_grad_norm=null"] if "backward" in name else []
    stock = by_samples(tune_run("full", *GROW[-2:], *how, name="stock", replaced=schedule, stock=True))
    grown = tune_run("full", *GROW, *how, name="grown", replaced=schedule)
    rates = by_samples(grown)
    sizes = [step["global_batch_size"] for step in grown.metrics]
    assert sizes == [4] * 8 + [8] * 4 + [16] * 8
    assert rates == {seen: stock[seen] for seen in rates}

    scaling = ["adaptive_batching.lr_scaling=linear", "adaptive_batching.max_lr_scale=3"]
    scaled = by_samples(tune_run("full", *GROW, *how, *scaling, name="scaled", replaced=schedule))
    expected = {seen: rate * min(size / 4, 3) for (seen, rate), size in zip(rates.items(), sizes, strict=True)}
    assert scaled == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("optimizer", "scale"), [("torch.optim.SGD", 4), ("torch.optim.AdamW", 2)])
def test_auto_scales_as_the_optimizer_needs(optimizer: str, scale: int, tune_run: TuneRun) -> None:
    common = ["dataset.split=train[:64]", "epochs=1", f"optimizer._component_={optimizer}", "optimizer.lr=0.01"]
    plain = by_samples(tune_run("full", *common, name="plain"))
    scaled = by_samples(tune_run("full", *common, *MAXIMUM, "adaptive_batching.lr_scaling=auto", name="scaled"))
    assert scaled == pytest.approx({seen: scale * plain[seen] for seen in (16, 32, 48, 64)}, rel=1e-12)


def test_a_first_step_that_the_schedule_does_not_move_with_leaves_one_rate_in_the_backward_pass(
    tune_run: TuneRun,
) -> None:
    """Three samples are less than a step of the schedule. Stock's scheduler first tells one of its optimizers alone."""
    three = ["use_maximum_batch_size=True", "micro_batch_size=3", "adaptive_batching.max_batch_size=5"]
    three += ["adaptive_batching.memory_limit=8GiB", "dataset.split=train[:24]", "epochs=1", "clip_grad_norm=null"]
    after, within = (
        tune_run("full", *three, f"optimizer_in_bwd={value}", name=str(value)).metrics for value in (False, True)
    )
    assert [step["batch_size"] for step in within] == [3] * 8
    assert [step["lr"] for step in within] == [step["lr"] for step in after]
