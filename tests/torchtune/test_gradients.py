"""Traces of forwards and backwards that broke off, and how batches reach the device."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import nn
from torchtune.training import OffloadActivations

from adaptive_batching._step import runner
from adaptive_batching._torchtune.stock.data import Sample
from adaptive_batching._torchtune.train import recipe_work
from adaptive_batching._torchtune.train.recipe_work import BatchesAsTheyRun, run_once
from tests.support.hosts import host, next_token


def test_offloaded_activations_of_a_step_that_broke_off_are_gone_before_memory_is_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("default_stream", "Stream"):  # of CUDA, which offloading asks for
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    context = OffloadActivations(use_pin_memory=False, use_streams=False)
    objective = next_token(activations=context)
    with pytest.raises(RuntimeError, match="breaks off"), context:
        model(torch.ones(32, 64, requires_grad=True))
        raise RuntimeError("breaks off")
    held = [weakref.ref(tensor) for tensor, _ in context.tracker.values()]
    assert len(held) >= 3
    del context
    alive_at_release: list[bool] = []
    monkeypatch.setattr(
        runner, "release_cached_memory", lambda device: alive_at_release.extend(ref() is not None for ref in held)
    )
    gc.disable()
    try:
        here = host(objective, model=model)
        breaks_off = torch.OutOfMemoryError()
        assert run_once(here, [mock.Mock(side_effect=breaks_off)]).failed
    finally:
        gc.enable()
    assert not any(alive_at_release) and len(alive_at_release) == len(held)
    next_context: Any = objective._activations
    with next_context:  # what runs next finds no trace of them
        assert next_context.tracker == {}


class Copied(torch.Tensor):
    """Notes how it is moved."""

    log: ClassVar[list[str]] = []

    def pin_memory(self) -> Copied:  # type: ignore[override]
        self.log.append("pinned")
        return self

    def to(self, device: torch.device, non_blocking: bool = False) -> Copied:  # type: ignore[override]
        self.log.append("without waiting" if non_blocking else "waiting")
        return self


@pytest.mark.parametrize(("device", "expected"), [("cuda", ["pinned", "without waiting"]), ("mps", ["waiting"])])
def test_batches_are_copied_without_waiting_for_the_device(device: str, expected: list[str]) -> None:
    Copied.log.clear()
    batch = {"tokens": torch.ones(2, 3).as_subclass(Copied), "images": {"pixels": torch.ones(2).as_subclass(Copied)}}
    recipe_work.to_device(batch, torch.device(device))
    assert Copied.log == expected * 2
    assert set(batch) == {"tokens", "images"}
    with pytest.raises(ValueError, match="must be a dict or Tensor"):
        recipe_work.to_device({"tokens": [1, 2, 3]}, torch.device("cpu"))


def test_batches_that_run_again_are_not_read_again_and_meet_the_random_numbers_that_they_met() -> None:
    def reading() -> Iterator[list[Sample]]:
        for number in range(3):
            torch.rand(1)  # as to augment
            yield [{"tokens": [number]}]

    torch.manual_seed(0)
    batches = BatchesAsTheyRun(reading(), torch.device("cpu"))
    first, again = [], []
    for batch in batches:
        first.append((batch, torch.rand(1).item()))
        if len(first) == 2:  # memory runs out
            break
    torch.manual_seed(1)
    for batch in batches:
        again.append((batch, torch.rand(1).item()))
    torch.manual_seed(0)
    undisturbed = [(batch, torch.rand(1).item()) for batch in reading()]
    assert again == undisturbed and first == undisturbed[:2] and batches.read == [batch for batch, _ in again]
