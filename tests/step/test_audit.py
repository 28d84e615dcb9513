from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from adaptive_batching import AdaptiveStep, ConfigError, _snapshot
from adaptive_batching._ranks.agree import ALONE
from adaptive_batching._snapshot import StepState
from adaptive_batching._step.audit import Audit
from tests.loop.test_step import SAMPLES, always, length, loss, make, mean_times_samples, texts
from tests.loop.test_step import collate as stock_collate
from tests.support.toy_work import ToyWork


def test_a_loss_that_looks_right_on_like_samples_is_found_out_by_unlike_ones() -> None:
    _, step = make(mean_times_samples, max_tokens=24)
    for _ in range(9):
        step(texts(*[8] * 6))  # of one length, where a mean over tokens looks like one over samples
    with pytest.raises(ConfigError, match=r"in two parts is [\d.]+ % off .* \(in step 10\).*sum and its number"):
        step(SAMPLES)


class Codebook(nn.Module):
    """Moves with what it has seen: a second part meets another than the first."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(16, dtype=torch.double))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # [b, c, s]
        hidden = hidden - self.seen[:, None]
        if self.training:
            self.seen += 0.5 * hidden.detach().mean((0, 2))
        return hidden


def test_a_model_that_changes_for_the_next_part_is_found_out_and_left_as_it_was() -> None:
    model, step = make(norm=Codebook(), max_tokens=24)
    before = [value.clone() for value in model.state_dict().values()]
    with pytest.raises(ConfigError, match="another in a second forward of the same samples"):
        step(SAMPLES)
    assert all(map(torch.equal, model.state_dict().values(), before))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("call", range(1, 5))
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_memory_that_runs_out_in_an_audit_is_no_matter(place: str, call: int) -> None:
    """It is looked at again in the next step."""
    model, step = make(max_tokens=64, max_grad_norm=0.5)
    _, clean = make(max_tokens=64, max_grad_norm=0.5)
    calls = iter(range(1, 10**6))

    def fail(*args: Any) -> None:
        if _snapshot.rehearsing and torch.is_grad_enabled() and next(calls) == call:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def fail_in_backward(module: Any, args: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(fail)

    if place == "forward":
        model.out.register_forward_pre_hook(fail)
    else:
        model.out.register_forward_hook(fail_in_backward)
    for _ in range(2):
        torch.testing.assert_close(step(SAMPLES), clean(SAMPLES))
    assert step.num_recoveries == 0
    assert step._runner._audit._next == 10  # type: ignore[union-attr]


def test_an_error_in_an_audit_is_that_of_the_loss_and_leaves_all_as_it_was() -> None:
    def fails(model: Any, batch: Any) -> Any:
        if torch.is_grad_enabled():
            raise KeyError("in the loss")
        return loss(model, batch)

    model, step = make(fails, max_tokens=64)
    numbers = torch.get_rng_state()
    with pytest.raises(KeyError, match="in the loss"):
        step(SAMPLES)
    assert torch.equal(torch.get_rng_state(), numbers) and not _snapshot.rehearsing
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("every", "expected"), [(None, [1, 10, 100]), (1, range(1, 121)), (50, [1, 51, 101])])
def test_steps_that_are_split_are_looked_at_now_and_then(every: int | None, expected: Any) -> None:
    looked = []
    parameter = nn.Parameter(torch.zeros(1))
    work = ToyWork()
    work.state, work.trained = StepState([]), [parameter]
    audit = Audit(work, ALONE, "", every)

    def run(parts: Any) -> bool:
        parameter.grad = torch.tensor([float(sum(map(sum, parts)))])
        looked.append(number)
        return True

    for number in range(1, 121):  # noqa: B007 (run reads it)
        audit.begin_step()
        audit.look([[1] * 8, [2]], run, again=False)
        audit.end_step()
    assert sorted(set(looked)) == list(expected)


def test_a_step_that_is_not_split_is_looked_at_when_it_is() -> None:
    _, step = make()
    for _ in range(3):
        step(SAMPLES)
    step.max_tokens = 64
    step(SAMPLES)
    assert step._runner._audit._next == 10  # type: ignore[union-attr]


@pytest.mark.parametrize("scale", [0.25, 0.0])
def test_a_backward_that_divides_the_loss_is_refused(scale: float) -> None:
    _, step = make()
    with pytest.raises(ConfigError, match=r"backward multiplies the loss by .*gradient_accumulation_steps at 1"):
        step.gradients(SAMPLES, lambda value: (value * scale).backward())  # type: ignore[no-untyped-call]


def test_the_collate_function_gets_samples_of_its_own() -> None:
    """It may pop keys and pad in place, also before samples run again."""
    samples = [{"tokens": sample.tolist(), "meta": {"n": [1]}} for sample in SAMPLES]

    def collate(batch: list[dict[str, Any]]) -> Any:
        for sample in batch:
            assert sample.pop("meta")["n"].pop() == 1
            sample["tokens"] += []
        return stock_collate([torch.tensor(sample.pop("tokens")) for sample in batch])

    model, _ = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = AdaptiveStep(model, optimizer, loss, collate, length=lambda sample: length(torch.tensor(sample["tokens"])))
    always(model, times=3)
    before = [str(sample) for sample in samples]
    step(samples)
    assert step.num_recoveries > 0 and [str(sample) for sample in samples] == before
