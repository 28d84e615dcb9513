"""What the allocator's history tells of a peak, from events as torch gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from adaptive_batching._dry_run.history import (
    BACKWARD,
    BUCKETS,
    COLLECTIVES,
    FORWARD,
    GRADIENTS,
    KEPT,
    STATES,
    STEP,
    WEIGHTS,
    WORKSPACES,
    Labels,
    Moments,
    line_of_script,
    place,
    read_history,
    step_of,
)
from adaptive_batching._step import judge

TORCH = f"{torch.__path__[0]}"
KIB = 1024
WORKSPACE = 8_519_680


def frame(file: str, line: int = 1, name: str = "f") -> dict[str, Any]:
    return {"filename": file, "line": line, "name": name}


SCRIPT = frame("/home/me/train.py", 7, "main")
LINEAR = frame(f"{TORCH}/nn/modules/linear.py", 134, "forward")
MODEL = frame(str(Path(TORCH).parent / "somewhere" / "model.py"), 3)
ADAM = frame(f"{TORCH}/optim/adam.py", 182, "_init_group")


def event(action: str, at: int, size: int, time: int, *frames: dict[str, Any]) -> dict[str, Any]:
    return {"action": action, "addr": at, "size": size, "time_us": time, "frames": list(frames)}


EVENTS = [
    event("segment_alloc", 0, 64 * KIB, 0, SCRIPT),
    event("alloc", 0, 4 * KIB, 1, SCRIPT),  # weights
    event("alloc", 100, 2 * KIB, 2, LINEAR, SCRIPT),  # an activation
    event("alloc", 200, 4 * KIB - 100, 3),  # a gradient, which is rounded up
    event("alloc", 300, 8 * KIB, 4),  # in the backward pass
    event("free_requested", 100, 2 * KIB, 5),
    event("free_completed", 100, 2 * KIB, 5),
    event("free_requested", 300, 8 * KIB, 6),
    event("alloc", 300, 4 * KIB, 8, ADAM, SCRIPT),  # a state at the address of what is gone
    event("alloc", 400, 1 * KIB, 9, ADAM, SCRIPT),
    event("free_requested", 200, 4 * KIB, 11),
]
LABELS = [Labels(7, {0: WEIGHTS, 200: GRADIENTS}), Labels(10, {0: WEIGHTS, 300: STATES, 999: STATES})]


def test_memory_at_the_peak_is_told_by_what_it_held_and_who_asked_for_it() -> None:
    history = read_history(EVENTS, LABELS)
    assert history.peak_bytes == 18 * KIB and history.peak_us == 4
    assert history.categories == {WEIGHTS: 4 * KIB, GRADIENTS: 4 * KIB, FORWARD: 2 * KIB, BACKWARD: 8 * KIB}
    largest = history.holders[0]
    assert (largest["category"], largest["where"], largest["bytes"]) == (BACKWARD, "backward pass", 8 * KIB)
    assert {"category": FORWARD, "where": "train.py:7 main", "bytes": 2 * KIB, "allocations": 1} in history.holders


def test_memory_at_an_address_that_is_used_again_has_the_name_of_its_own_time() -> None:
    last = read_history(EVENTS, LABELS).points[-1]
    assert last["reserved"] == 64 * KIB and last[WEIGHTS] == last[STATES] == 4 * KIB and last[STEP] == KIB
    assert last["allocated"] == sum(last[kind] for kind in (WEIGHTS, GRADIENTS, STATES, STEP) if kind in last)


def test_a_history_ends_where_an_allocation_failed() -> None:
    history = read_history(EVENTS, LABELS, Moments(until=3))
    assert history.peak_bytes == 10 * KIB and BACKWARD not in history.categories
    assert read_history([], []).points == []


@pytest.mark.parametrize(
    ("frames", "where", "line"),
    [
        ([], "backward pass", None),
        ([LINEAR, SCRIPT], "train.py:7 main", "train.py:7 main"),
        ([LINEAR, frame(str(judge.__file__)), SCRIPT], "train.py:7 main", "train.py:7 main"),
        ([LINEAR, MODEL, SCRIPT], "somewhere/model.py:3 f", "train.py:7 main"),
        ([LINEAR, frame("<string>"), LINEAR], "modules/linear.py:134 forward", None),
    ],
)
def test_a_place_is_the_line_outside_of_torch_and_a_line_of_the_script_is_the_user_s(
    frames: list[dict[str, Any]], where: str, line: str | None
) -> None:
    assert (place(frames), line_of_script(frames)) == (where, line)


DDP = f"{TORCH}/nn/parallel/distributed.py"
ALL = Moments()
GENERATED = frame("/tmp/torchinductor_me/qd/c" + 50 * "x" + ".py", 216, "call")


def category_of(size: int, *frames: dict[str, Any], freed: int | None = None, moments: Moments = ALL) -> str:
    events = [event("alloc", 0, size, 5, *frames)]
    events += [] if freed is None else [event("free_requested", 0, size, freed)]
    [category] = read_history(events, [], moments, WORKSPACE).categories
    return category


@pytest.mark.parametrize(
    ("category", "frames"),
    [
        (BUCKETS, [frame(DDP, 1437, "_ddp_init_helper"), SCRIPT]),
        (BUCKETS, [frame(DDP, 1775, "_pre_forward"), frame(f"{TORCH}/nn/modules/module.py"), SCRIPT]),
        (COLLECTIVES, [frame(f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_collectives.py"), SCRIPT]),
        (STEP, [frame(f"{TORCH}/nn/utils/clip_grad.py"), SCRIPT]),
        (FORWARD, [LINEAR, frame(f"{TORCH}/nn/modules/module.py"), frame(f"{TORCH}/optim/lbfgs.py"), SCRIPT]),
        (STEP, [frame(f"{TORCH}/optim/lbfgs.py"), SCRIPT]),
        (FORWARD, [LINEAR, SCRIPT]),
    ],
)
def test_memory_that_no_label_names_is_told_by_who_asked_for_it(category: str, frames: list[dict[str, Any]]) -> None:
    assert category_of(4 * KIB, *frames, freed=6) == category


def test_memory_that_no_label_names_is_told_by_its_size_and_time_as_well() -> None:
    assert category_of(WORKSPACE, LINEAR, SCRIPT) == category_of(WORKSPACE) == WORKSPACES
    assert category_of(WORKSPACE, LINEAR, SCRIPT, freed=7) == FORWARD
    in_step = Moments(steps=[(4, 6)])
    assert category_of(4 * KIB, MODEL, SCRIPT, moments=in_step) == STEP, "of an optimizer of somebody's own"
    assert category_of(4 * KIB, MODEL, SCRIPT, moments=Moments(steps=[(1, 2), (7, 9)])) == FORWARD
    assert category_of(4 * KIB, MODEL, SCRIPT, freed=9, moments=Moments(ends=[4, 8])) == KEPT
    assert category_of(4 * KIB, MODEL, SCRIPT, freed=7, moments=Moments(ends=[4, 8])) == FORWARD


def test_buckets_that_ddp_has_replaced_and_that_are_held_are_told() -> None:
    events = [
        event("alloc", 0, 4 * KIB, 1, frame(DDP, 1437, "_ddp_init_helper"), SCRIPT),
        event("alloc", 100, 4 * KIB, 2, frame(DDP, 1775, "_pre_forward"), SCRIPT),
    ]
    assert read_history(events, []).outdated_buckets_bytes == 4 * KIB
    assert read_history(events[:1], []).outdated_buckets_bytes == 0


def test_a_line_that_inductor_wrote_is_told_as_the_line_that_it_was_compiled_from() -> None:
    compiled = frame(f"{TORCH}/_inductor/output_code.py")
    assert place([GENERATED, compiled, MODEL, SCRIPT]) == "somewhere/model.py:3 f, compiled"
    assert line_of_script([GENERATED, compiled, MODEL, SCRIPT]) == "train.py:7 main"
    assert place([GENERATED, compiled]) == "compiled backward pass" and line_of_script([GENERATED, compiled]) is None


def test_a_moment_is_in_the_step_that_has_not_ended() -> None:
    assert [step_of(moment, [10, 20]) for moment in (5, 10, 15, 25)] == [1, 2, 2, 3]


def test_a_long_history_is_drawn_with_few_points_that_keep_its_peak() -> None:
    events = [event("alloc", index, 512, index, SCRIPT) for index in range(5000)]
    events += [event("free_requested", index, 512, 5000 + index) for index in range(5000)]
    history = read_history(events, [])
    assert len(history.points) <= 401 and max(point["allocated"] for point in history.points) == 5000 * 512
