"""A plan in words: the first line, and how sure it is."""

from __future__ import annotations

import json
import re
import statistics

import pytest

from adaptive_batching._plan import Answer, Need, Outside
from adaptive_batching._torchtune.plan_answer import AGAINST_ALLOCATOR, AGAINST_PUBLISHED, first_line, how_sure
from adaptive_batching._trace.allocator import GIB, MIB
from adaptive_batching._trace.reserved import Reserved
from tests.conftest import ROOT

RESERVED = Reserved(
    by_default=20 * GIB, expandable=18 * GIB, least=19 * GIB, least_expandable=17 * GIB, allocated=16 * GIB
)
NEED = Need(1, 16 * GIB, GIB, "loss", {}, RESERVED, [Outside("context", 1 * GIB, 2 * GIB, "a source")], 0, 0, 0)


@pytest.mark.parametrize(
    ("memory", "answer", "words"),
    [
        (22 * GIB, Answer.FITS, "fits: it needs at most 22.00 GiB of 22.00 GiB on a card, 0.0 MiB left"),
        (22 * GIB - 1, Answer.TIGHT, "tight: it needs 18.00 GiB to 22.00 GiB of 22.00 GiB on a card; 4.00 GiB left"),
        (18 * GIB, Answer.TIGHT, "tight"),
        (18 * GIB - MIB, Answer.DOES_NOT_FIT, "does not fit: it needs at least 18.00 GiB of 18.00 GiB on a card, 1.0 "),
        (None, Answer.CANNOT_TELL, "cannot tell: it needs 18.00 GiB to 22.00 GiB; give --memory or --gpu"),
    ],
)
def test_the_answer_rests_on_what_is_reserved_and_on_what_is_beside_it(
    memory: int | None, answer: Answer, words: str
) -> None:
    assert NEED.within(memory) is answer
    assert first_line(NEED, memory, "it", " on a card").startswith(words)


def test_what_a_plan_says_of_itself_is_what_the_committed_results_say() -> None:
    allocator, published = (
        (ROOT / "benchmarks" / "results" / name).read_text()
        for name in ("plan_vs_allocator_emulated.md", "published_memory_cpu.md")
    )
    assert json.loads(allocator.strip().splitlines()[-1]) == AGAINST_ALLOCATOR
    figures = json.loads(published.strip().splitlines()[-1])
    assert [figures[key] for key in ("rows", "median_error", "max_error")] == list(AGAINST_PUBLISHED.values())
    errors = [abs(float(error)) / 100 for error in re.findall(r"\| ([+-][\d.]+) % \|", published)]
    assert (len(errors), statistics.median(errors), max(errors)) == tuple(AGAINST_PUBLISHED.values())


def test_errors_are_rounded_up() -> None:
    allocator = {"rows": 40, "max_allocated_error": 0.00421, "max_reserved_error": 0.015}
    assert how_sure(allocator, {"peaks": 3, "half_within": 0.031, "all_within": 0.1}) == (
        "How sure: in 40 runs on PyTorch's own allocator, tensors were within 0.5 % of the plan, and what it reserves "
        "at least, no stream being late, within 1.5 %; of 3 published peaks, half were within 4 %, all within 10 %"
    )
