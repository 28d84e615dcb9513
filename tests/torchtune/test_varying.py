"""Forwards of many shapes: their records follow from two lengths, and an allocator is asked for all in turn."""

from __future__ import annotations

import pytest

from adaptive_batching._torchtune.planning import Question, as_they_come, look_out, sketch
from adaptive_batching._torchtune.varying import DataAtHand, TracedLengths, Varying, replay_shapes
from adaptive_batching._trace.reserved import reserved_for
from tests.torchtune.test_on_paper import config

# With more words than tokens in any forward here: the workspace of an embedding's gradient has a bend at that number.
AUTO = ["micro_batch_size=auto", "adaptive_batching.memory_limit=null", "model.vocab_size=16384"]
CASES = {
    "full": ("full",),
    "checkpointing": ("full", "enable_activation_checkpointing=True", "dtype=bf16"),
    "compiled": ("full", "compile=True"),
    "lora": ("lora",),
}


def drawn(kind: str, *overrides: str) -> Question:
    cfg = config(kind, *AUTO, *overrides)
    return Question(f"{kind}_finetune_single_device", cfg, samples=64, memory_bytes=2 * 2**30)


def lengths_of(question: Question) -> TracedLengths:
    return TracedLengths(*((length, sketch(question, length).forecast.step) for length in (256, 128)))


@pytest.mark.parametrize("case", CASES)
def test_a_step_at_any_shape_is_what_is_traced_at_that_length(case: str) -> None:
    question = drawn(*CASES[case])
    traced = lengths_of(question)
    for length in (64, 104, 200, 400):
        real = sketch(question, length).forecast.step
        for samples in (1, 3, 20):
            ours, theirs = traced.at((samples, length)), real.at(samples)
            assert ours.events == theirs.events
            # The workspace of an embedding's gradient is rounded to bytes in each of the traced shapes.
            assert ours.sizes == pytest.approx(theirs.sizes, rel=1e-4, abs=1)


def test_forwards_of_one_shape_reserve_what_a_plan_of_that_shape_says() -> None:
    traced = lengths_of(drawn("full"))
    alone = reserved_for(traced.at((4, 200)))
    together = replay_shapes(traced, [[(4, 200)]] * 3, limit=2**40)
    assert (together.by_default, together.expandable) == (alone.by_default, alone.expandable)
    assert (together.runs, together.retries, together.forwards, together.longest) == (True, 0, 3, 200)
    in_parts = replay_shapes(traced, [[(4, 200)] * 5] * 3)
    assert in_parts.by_default == alone.by_default, "a forward more takes nothing more"
    assert in_parts.runs is None


def test_within_a_limit_the_cache_is_emptied_or_memory_runs_out() -> None:
    traced = lengths_of(drawn("full"))
    steps = [[(1, 400), (8, 100)], [(2, 390), (30, 32)], [(16, 50), (3, 300)]]
    free = replay_shapes(traced, steps)
    assert free.by_default >= max(reserved_for(traced.at(shape)).by_default for step in steps for shape in step)
    tight = replay_shapes(traced, steps, limit=free.by_default - 1)
    assert tight.retries or not tight.runs
    assert replay_shapes(traced, steps, limit=100 * 2**20).runs is False


def test_the_forwards_are_those_into_which_the_samples_are_cut() -> None:
    """Each has at most the tokens that fit, and together they have all samples of the optimizer steps."""
    question = drawn("full", "batch_size=16", "gradient_accumulation_steps=2")
    data = DataAtHand([20 + 37 * index % 230 for index in range(64)], packed=False)
    longest = max(data.lengths)
    varying = come(question, data)
    assert varying is not None
    assert varying.steps == 2 and varying.forwards >= 4
    assert varying.longest == longest
    assert come(drawn("full", "micro_batch_size=4"), data) is None
    assert come(question, DataAtHand([longest] * 64, packed=True)) is None


def come(question: Question, data: DataAtHand) -> Varying | None:
    made = sketch(question, max(data.lengths))
    assert made.largest
    return as_they_come(made, data, look_out(question, made.length, made.largest))
