"""Optimizers of bitsandbytes, whose CPU kernels run here. Only paging is stood in for: states that say they are managed
lie on the host."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from torch import nn

from adaptive_batching._memory import CpuMeter
from adaptive_batching._probe import trial as trial_module
from adaptive_batching._probe.trial import Trial
from adaptive_batching._trace.bits_and_bytes import is_managed, paged_bytes, traced_as
from adaptive_batching._trace.trace import trace_step
from adaptive_batching._trace.traced_step import STATES
from adaptive_batching._trace.training import TrainingStep
from tests.support.steps import step_of

BUDGET = 2**40
WIDTH = 400  # squared, a state is large enough to be paged
OF_8_BITS = [f"{name}8bit" for name in ("AdamW", "Adam", "Lion", "RMSprop", "Adagrad", "LAMB", "AdEMAMix")]


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """All states that were allocated in managed memory, as which these tests take what the host has."""
    allocated: list[torch.Tensor] = []
    on_host = bitsandbytes.optim.optimizer.Optimizer8bit.get_state_buffer

    def get_state_buffer(self: Any, parameter: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        if not self.is_paged or parameter.numel() < 1e5:
            return on_host(self, parameter, dtype)
        buffer = torch.zeros_like(parameter, dtype=dtype)
        buffer.is_paged = True  # type: ignore[attr-defined]
        allocated.append(buffer)
        return buffer

    monkeypatch.setattr(bitsandbytes.optim.optimizer.Optimizer8bit, "get_state_buffer", get_state_buffer)
    monkeypatch.setattr(bitsandbytes.functional, "prefetch_tensor", lambda tensor: None)
    monkeypatch.setattr(bitsandbytes.functional, "fill", lambda tensor, value: tensor.fill_(value))
    return allocated


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Tensors of which a trial has saved copies."""
    found: list[torch.Tensor] = []
    keep = trial_module.kept_aside

    def note(tensors: Sequence[torch.Tensor], scratch: Path | None) -> Any:
        found.extend(tensors)
        return keep(tensors, scratch)

    monkeypatch.setattr(trial_module, "kept_aside", note)
    return found


def step_with(name: str, **arguments: Any) -> TrainingStep:
    """A step of an optimizer of bitsandbytes, on a model that is always the same."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8))
    optimizer = getattr(bitsandbytes.optim, name)(model.parameters(), **arguments)
    return step_of(model, optimizer, lambda out: out.square().mean(), lambda size: torch.ones(size, WIDTH))


def train(step: TrainingStep) -> None:
    step.bind(step.model, step.optimizers)(step.make_batch(4))


def states_of(step: TrainingStep) -> dict[str, torch.Tensor]:
    """Tensors of the states by parameter and name, without the maps of codes that all parameters share."""
    entries = enumerate(step.optimizers[0].state.values())
    named = {f"{number}.{name}": value for number, entry in entries for name, value in entry.items()}
    return {name: value for name, value in named.items() if isinstance(value, torch.Tensor) and "qmap" not in name}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("name", ["PagedAdamW8bit", "PagedAdamW", "PagedLion8bit", "PagedLion"])
def test_paged_states_are_made_once_never_saved_while_zero_and_start_training_at_zero(
    pages: list[torch.Tensor], saved: list[torch.Tensor], name: str
) -> None:
    def run(*, probes: bool) -> TrainingStep:
        pages.clear()
        step = step_with(name, lr=1e-2)
        if probes:
            with Trial(step, CpuMeter(), BUDGET) as trial:
                assert trial.measure(3).fits
                assert any(page.any() for page in pages), "the step has changed them"
            assert saved and not any(map(is_managed, saved))
            assert not any(page.any() for page in pages)
        for _ in range(3):
            train(step)
        assert len(pages) == (2 if "Adam" in name else 1), "each of the large weight's was allocated once"
        return step

    probed, plain = run(probes=True), run(probes=False)
    assert_equal(probed.model.state_dict(), plain.model.state_dict())
    assert_equal(states_of(probed), states_of(plain))


def test_paged_states_that_training_has_changed_are_saved_and_restored(
    pages: list[torch.Tensor], saved: list[torch.Tensor]
) -> None:
    step = step_with("PagedAdamW8bit", lr=1e-2)
    train(step)
    before = {name: value.clone() for name, value in states_of(step).items()}
    with Trial(step, CpuMeter(), BUDGET) as trial:
        assert trial.measure(3).fits
    assert sum(map(is_managed, saved)) == len(pages) == 2
    assert_equal(states_of(step), before)


@pytest.mark.parametrize("name", [*OF_8_BITS, "AdamW", "Lion", "AdEMAMix"])
@pytest.mark.parametrize("stepped", [True, False])
def test_a_trace_has_the_states_of_the_optimizer_and_runs_none_of_its_kernels(
    name: str, stepped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would run on null pointers, or make states that a paged optimizer can never free."""
    step, other = step_with(name), step_with(name)
    train(other)
    expected = sum(value.nbytes for key, value in states_of(other).items() if "unorm" not in key)  # a norm of 4 bytes
    for kernel in ("optimizer_update_8bit_blockwise", "optimizer_update_32bit"):
        monkeypatch.setattr(bitsandbytes.functional, kernel, lambda *args, **kwargs: pytest.fail("a kernel ran"))
    _, kinds = trace_step(other if stepped else step).record_at(4).at_peak()
    assert kinds[STATES] == expected
    assert not step.optimizers[0].state


@pytest.mark.parametrize("stepped", [True, False])
@pytest.mark.parametrize(("name", "num_bytes"), [("AdamW8bit", 1), ("AdamW", 4)])
def test_paged_states_take_no_memory_of_the_device_in_a_trace(
    pages: list[torch.Tensor], stepped: bool, name: str, num_bytes: int
) -> None:
    def resting(kind: str) -> int:
        step = step_with(kind)
        if stepped:
            train(step)
        return trace_step(step).curve.resting_bytes

    assert resting(name) - resting(f"Paged{name}") == 2 * WIDTH**2 * num_bytes


def test_states_loaded_from_a_checkpoint_are_no_longer_paged() -> None:
    """bitsandbytes loads them to where the parameters are."""
    step, loaded = step_with("PagedAdamW8bit"), step_with("PagedAdamW8bit")
    assert paged_bytes(traced_as(step.optimizers[0])) == 2 * WIDTH**2
    train(step)
    loaded.optimizers[0].load_state_dict(step.optimizers[0].state_dict())
    assert paged_bytes(traced_as(loaded.optimizers[0])) == 0
