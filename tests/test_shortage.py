"""Why memory ran out: what the numbers show, and nothing that they do not."""

from __future__ import annotations

import pytest

from adaptive_batching._memory.shortage import LongerSample, Shortage, StepStarts, cause_of, read_message

MIB, GIB = 2**20, 2**30
MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB of which 1.50 GiB is "
    "free. Process 7 has 10.00 GiB memory in use. Including non-PyTorch memory, this process has 12.00 GiB memory in "
    "use. {}Of the allocated memory 8.00 GiB is allocated by PyTorch, with 1.00 GiB allocated in private pools (e.g., "
    "CUDA Graphs), and 512.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large "
    "try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


def starts(*in_use: int) -> StepStarts:
    noted = StepStarts()
    for each in in_use:
        noted.note(each * MIB)
    return noted


FLAT, GROWING = starts(10, 30, 30, 30, 30), starts(10, 30, 30, 50, 70, 90)


def test_the_numbers_of_an_error_of_torch_s_are_read() -> None:
    assert read_message(MESSAGE.format("")) == Shortage(2 * GIB, 3 * GIB // 2, 8 * GIB, 17 * GIB // 2)
    limited = read_message(MESSAGE.format("9.00 GiB allowed; "))
    assert limited is not None and limited.free == GIB // 2
    zero = read_message(MESSAGE.replace("1.50 GiB is free", "0 bytes is free").format(""))
    assert zero is not None and zero.free == 0
    assert read_message("DefaultCPUAllocator: can't allocate memory: you tried to allocate 40000 bytes.") is None


@pytest.mark.parametrize(
    ("asked", "free", "unused", "shown"),
    [(100, 60, 50, True), (100, 60, 30, False), (100, 60, 40, False), (100, 120, 50, False), (100, 0, 500, True)],
)
def test_fragments_are_a_cause_if_what_was_asked_for_would_fit_into_all_that_is_unused(
    asked: int, free: int, unused: int, shown: bool
) -> None:
    shortage = Shortage(asked * MIB, free * MIB, 200 * MIB, (200 + unused) * MIB)
    cause = cause_of(shortage, FLAT, None, "X=y:True")
    assert (cause is not None) == shown
    if cause is not None:
        assert f"{free}" in cause and f"{unused} MiB more is unused" in cause and cause.endswith("variable X=y:True")
        assert "variable" not in (cause_of(shortage, FLAT, None) or "")


@pytest.mark.parametrize(
    ("noted", "asked", "shown"),
    [
        (GROWING, 60, True),
        (GROWING, 61, False),  # it would not have fitted before either
        (FLAT, 10, False),
        (starts(10, 30, 30, 50, 70), 30, False),  # twice may be chance
        (starts(10, 30, 50, 70, 90, 60), 10, False),  # it has fallen
        (starts(10, 30, 50, 40, 60, 80, 100), 60, True),
    ],
)
def test_growth_from_step_to_step_is_a_cause_if_it_would_have_fitted_without(
    noted: StepStarts, asked: int, shown: bool
) -> None:
    cause = cause_of(Shortage(asked * MIB, 0, 100 * MIB, 100 * MIB), noted, None)
    assert (cause is not None) == shown
    if cause is not None:
        assert "60 MiB more in use than step" in cause and f"step {noted.steps} began" in cause


def test_a_longer_sample_is_named_and_comes_with_other_causes() -> None:
    longer = LongerSample(900, 512, "number 7 of dataset")
    assert cause_of(None, FLAT, longer) == (
        "a sample, number 7 of dataset, has 900 tokens, and none before had more than 512"
    )
    both = cause_of(Shortage(60 * MIB, 0, MIB, 100 * MIB), FLAT, longer) or ""
    assert "900 tokens" in both and "; and memory is fragmented" in both
    assert cause_of(None, GROWING, None) is None
