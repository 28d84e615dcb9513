"""The gradient of a batch is the same however it is split: random batches, within a real recipe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adaptive_batching._torchtune.stock.data import Sample
from adaptive_batching._torchtune.stock.host import Host
from adaptive_batching._torchtune.train.recipe_work import run_once, runs_of
from adaptive_batching._torchtune.train.splitting import MicroBatch, SplitPolicy, Splitter
from adaptive_batching._torchtune.train.training_run import TrainingRun
from adaptive_batching._values import ByLength, Explore, parse_micro_batch_size
from tests.conftest import ARCHITECTURE, TuneRun

IGNORED = -100


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
    outcome = run_once(host, runs_of(host, micro_batches))
    assert not outcome.failed
    flat = torch.cat([p.grad.flatten() for p in host.model.parameters() if p.grad is not None]).double()
    return flat, sum(float(each.loss) for each in outcome.results), sum(int(each.tokens) for each in outcome.results)


@pytest.mark.parametrize("loss", ["torchtune.modules.loss.CEWithChunkedOutputLoss", "torch.nn.CrossEntropyLoss"])
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_random_cuts_of_random_batches_have_the_gradient_of_the_whole(
    kind: str, loss: str, tune_run: TuneRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    class Compared:
        """In place of the training loop."""

        def __init__(self, training: TrainingRun, *arguments: Any, **named: Any) -> None:
            self.host = training.host

        def run(self) -> None:
            host = self.host

            @settings(max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck))
            @given(
                batch=batches,
                micro_batch_size=st.sampled_from([None, 1, 2, 3, "auto"]),
                tokens=st.integers(1, 200),
                limit=st.none() | st.integers(1, 200),
                min_parts=st.integers(1, 4),
                in_order=st.booleans(),
                apart=st.integers(0, 8),
                more=st.lists(batches, max_size=2),
            )
            def compare(
                batch: Any, micro_batch_size: Any, tokens: int, limit: Any, min_parts: int, in_order: bool, apart: int,
                more: list[Any],
            ) -> None:  # fmt: skip
                window = [batch, *(more if micro_batch_size == "auto" else [])]
                size = parse_micro_batch_size(micro_batch_size)
                assert not isinstance(size, Explore)
                split_policy = SplitPolicy(size, tokens if isinstance(size, ByLength) else None)
                split_policy.limit.max_tokens = limit
                splitter = Splitter(host, split_policy)
                if 0 < apart < len(batch):
                    split = [micro_batch for group in splitter.split_apart(window, apart) for micro_batch in group]
                elif len(window) > 1:
                    split = splitter.split_together(window)
                else:
                    split = splitter.split(batch, min_parts, in_order=in_order)
                expected, expected_loss, expected_count = gradient(host, [MicroBatch(each, 1) for each in window])
                found, found_loss, count = gradient(host, split)
                assert count == expected_count
                assert float((found - expected).norm()) <= 1e-5 * float(expected.norm())
                assert found_loss == pytest.approx(expected_loss, rel=1e-5)
                tried.append(len(split))

            compare()

    monkeypatch.setattr("adaptive_batching._torchtune.train.session.TrainingLoop", Compared)
    tune_run(kind, f"loss._component_={loss}", "epochs=1")
    assert max(tried) >= 5 and sum(count > 1 for count in tried) > 6
