"""The three answers, and GPUs by name."""

from __future__ import annotations

import pytest

from adaptive_batching._plan.devices import GPUS, Outside, find_gpu, outside_of_allocator
from adaptive_batching._plan.text import first_line
from adaptive_batching._plan.verdict import Answer, judge
from adaptive_batching._trace.allocator import GIB, MIB
from adaptive_batching._trace.reserved import Reserved
from adaptive_batching._values import ConfigError

RESERVED = Reserved(
    by_default=20 * GIB, expandable=18 * GIB, least=19 * GIB, least_expandable=17 * GIB, allocated=16 * GIB
)
BESIDE = [Outside("context", 1 * GIB, 2 * GIB, "a source")]


@pytest.mark.parametrize(
    ("memory", "answer", "words"),
    [
        (22 * GIB, Answer.FITS, "fits: it needs at most 22.00 GiB of 22.00 GiB on a card, 0.0 MiB left"),
        (22 * GIB - 1, Answer.TIGHT, "tight: it needs 18.00 GiB to 22.00 GiB of 22.00 GiB on a card; 4.00 GiB left"),
        (18 * GIB, Answer.TIGHT, "tight"),
        (
            18 * GIB - MIB,
            Answer.DOES_NOT_FIT,
            "does not fit: it needs at least 18.00 GiB of 18.00 GiB on a card, 1.0 MiB",
        ),
        (None, Answer.CANNOT_TELL, "cannot tell: it needs 18.00 GiB to 22.00 GiB; give --memory or --gpu"),
    ],
)
def test_the_answer_rests_on_what_is_reserved_and_on_what_is_beside_it(
    memory: int | None, answer: Answer, words: str
) -> None:
    verdict = judge(RESERVED, BESIDE, memory)
    assert verdict.answer is answer
    assert first_line(verdict, "it", " on a card").startswith(words)


def test_exit_codes_are_those_of_the_documentation() -> None:
    assert {answer.name: answer.value for answer in Answer} == {
        "FITS": 0, "DOES_NOT_FIT": 1, "TIGHT": 3, "CANNOT_TELL": 4,
    }  # fmt: skip


def test_several_devices_have_buffers_of_nccl() -> None:
    assert len(outside_of_allocator(2)) == len(outside_of_allocator(1)) + 1
    assert all(0 <= each.least < each.most and each.source for each in outside_of_allocator(2))


@pytest.mark.parametrize(
    "name", ["RTX 4090", "rtx4090", "NVIDIA GeForce RTX 4090", "H100", "a100-80gb", "A100 80GB PCIe"]
)
def test_gpus_are_found_however_they_are_spelled(name: str) -> None:
    assert find_gpu(name) in GPUS


@pytest.mark.parametrize(
    ("name", "message"),
    [("A100", "one of several .*A100-40GB, A100-80GB"), ("RTX 4091", "did you mean 'RTX 4090'"), ("TPU", "known are")],
)
def test_a_name_that_is_unclear_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_gpu(name)
