"""The gradient of a batch is the same however it is split, within real recipes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adaptive_batching._step.limits import TokenLimit
from adaptive_batching._torchtune.stock.data import Sample
from adaptive_batching._torchtune.stock.host import Host
from adaptive_batching._torchtune.train.recipe_work import MicroBatch, SplitPolicy, Splitter, TrainingWork, run_once
from adaptive_batching._torchtune.train.run import TrainingLoop
from adaptive_batching._values import ByLength, Explore, Fixed, parse_micro_batch_size
from tests.conftest import ARCHITECTURE, TuneRun
from tests.support.overrides import RECOVER, WIDE
from tests.support.wide import wide

IGNORED = -100
CHUNKS = "loss._component_=torchtune.modules.loss.CEWithChunkedOutputLoss"
CHECKPOINTED, NO_DROPOUT = "enable_activation_checkpointing=True", "model.lora_dropout=0.0"


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    """Of any length, with any labels to learn: none, all but the prompt, or here and there."""
    length = draw(st.integers(1, 40))
    tokens = draw(st.lists(st.integers(0, ARCHITECTURE["vocab_size"] - 1), min_size=length, max_size=length))
    learned = draw(st.lists(st.booleans(), min_size=length, max_size=length))
    return {"tokens": tokens, "labels": [t if keep else IGNORED for t, keep in zip(tokens, learned, strict=True)]}


batches = st.lists(samples(), min_size=2, max_size=9).filter(
    lambda batch: any(label != IGNORED for sample in batch for label in sample["labels"][1:])
)


def gradient(host: Host, micro_batches: list[MicroBatch]) -> tuple[torch.Tensor, float, int]:
    """The gradient of the summed loss, flat, that loss, and the number that both are divided by."""
    host.optimizers[0].zero_grad()
    outcome = run_once(host, TrainingWork(host, Splitter(host, SplitPolicy())).runs(micro_batches))
    assert not outcome.failed
    flat = torch.cat([p.grad.flatten() for p in host.model.parameters() if p.grad is not None]).double()
    return flat, sum(float(each.loss) for each in outcome.results), sum(int(each.tokens) for each in outcome.results)


def assert_same_gradient(
    host: Host, found: list[MicroBatch], expected: list[MicroBatch], rel: float
) -> tuple[int, int]:
    """Return the numbers that each is divided by."""
    (ours, loss, count), (theirs, expected_loss, expected_count) = gradient(host, found), gradient(host, expected)
    assert float((ours - theirs).norm()) <= rel * float(theirs.norm())
    assert loss == pytest.approx(expected_loss, rel=rel)
    return count, expected_count


@pytest.mark.parametrize(
    ("kind", "loss"), [("full", CHUNKS), wide("lora", "loss._component_=torch.nn.CrossEntropyLoss")]
)
def test_random_cuts_of_random_batches_have_the_gradient_of_the_whole(
    kind: str, loss: str, tune_run: TuneRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def compare_with_whole_batches(loop: TrainingLoop) -> None:
        host = loop._host

        @settings(max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(
            batch=batches,
            micro_batch_size=st.sampled_from([None, 1, 2, 3, "auto"]),
            tokens=st.integers(1, 200),
            limit=st.none() | st.integers(1, 200),
            more=st.lists(batches, max_size=2),
        )
        def compare(batch: Any, micro_batch_size: Any, tokens: int, limit: Any, more: list[Any]) -> None:
            window = [batch, *(more if micro_batch_size == "auto" else [])]
            size = parse_micro_batch_size(micro_batch_size)
            assert not isinstance(size, Explore)
            split_policy = SplitPolicy(size, limit=TokenLimit(tokens if isinstance(size, ByLength) else None))
            split_policy.limit.learned = limit
            splitter = Splitter(host, split_policy)
            split = splitter.split_together(window) if len(window) > 1 else splitter.split(batch)
            count, expected = assert_same_gradient(host, split, [MicroBatch(each, 1) for each in window], rel=1e-5)
            assert count == expected
            tried.append(len(split))

        compare()

    monkeypatch.setattr(TrainingLoop, "run", compare_with_whole_batches)
    tune_run(kind, loss, "epochs=1", *RECOVER)
    assert max(tried) >= 5 and sum(count > 1 for count in tried) > 6


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        wide("full", []),
        ("full", [CHUNKS, CHECKPOINTED]),
        wide("lora", [NO_DROPOUT, CHECKPOINTED]),
        ("lora_dpo", [NO_DROPOUT, *WIDE, "loss.beta=2.0"]),
        wide("kd", [NO_DROPOUT]),
    ],
)
def test_samples_end_to_end_in_a_row_have_the_gradient_of_one_sample_at_a_time(
    kind: str, overrides: list[str], tune_run: TuneRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []

    def compare_with_single_samples(loop: TrainingLoop) -> None:
        host = loop._host
        assert host.rows is not None
        batch = host.loader.load(range(12))
        host.objective.begin_step(0, len(batch))
        alone = Splitter(host, SplitPolicy(Fixed(1))).split(batch)
        for capacity in (160, 10**6):
            rows = Splitter(host, SplitPolicy(ByLength(), limit=TokenLimit(capacity))).split(batch)
            assert_same_gradient(host, rows, alone, rel=1e-6)
            compared.append(len(rows))

    monkeypatch.setattr(TrainingLoop, "run", compare_with_single_samples)
    tune_run(kind, *overrides, "micro_batch_size=auto", "adaptive_batching.memory_limit=8GiB", "epochs=1")
    some_rows, one_row = compared
    assert 12 > some_rows > one_row == 1
