from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.optim import Optimizer

from adaptive_batching import _trace
from adaptive_batching._trace import compiled, fake_step, trace
from adaptive_batching._trace.recorder import Recorder, state_tensors
from adaptive_batching._trace.trace import trace_peak_memory
from adaptive_batching._trace.traced_step import PeakMemoryCurve, TraceError
from adaptive_batching._trace.training import TrainingStep
from tests.support.steps import check_against_a_real_step, step_of, sum_of_squares

VOCABULARY, WIDTH, LENGTH = 4000, 64, 16


def training_step(
    model: nn.Module, optimizer: Optimizer | None = None, loss: Callable[[torch.Tensor], torch.Tensor] = torch.sum
) -> TrainingStep:
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    return step_of(model, optimizer, loss, lambda size: torch.randn(size, WIDTH))


def take_step(step: TrainingStep) -> None:
    step.bind(step.model, step.optimizers)(step.make_batch(2))


def deep_model() -> nn.Module:
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())])


def peaks(curve: PeakMemoryCurve) -> list[int]:
    return [curve.peak_bytes(size) for size in (2, 50)]


def test_the_curve_is_the_largest_line_and_needs_traces_of_one_length() -> None:
    # at rest 10; operations: 100 + 0 b, 20 + 30 b
    curve = PeakMemoryCurve([10, 100, 80], [10, 100, 110])
    assert [curve.peak_bytes(b) for b in (1, 2, 3, 4, 10)] == [100, 100, 110, 140, 320]
    assert curve.resting_bytes == 10
    with pytest.raises(TraceError, match="3 operations at b=2 and 2 at b=3"):
        PeakMemoryCurve([1, 2, 3], [1, 2])


@pytest.mark.parametrize("trained_before", [False, True])
def test_a_trace_changes_nothing_and_is_the_same_before_and_after_the_first_step(trained_before: bool) -> None:
    model = deep_model()
    optimizer = torch.optim.AdamW(model.parameters())
    step = training_step(model, optimizer)
    if trained_before:
        take_step(step)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    random_state = torch.get_rng_state()
    first = trace_peak_memory(step)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    assert str(optimizer.state_dict()) == str(state)
    take_step(step)
    assert peaks(first) == peaks(trace_peak_memory(step))
    assert first.resting_bytes == sum(t.nbytes for t in [*model.parameters(), *state_tensors([optimizer])])


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9)])
def test_states_on_a_device_are_traced_on_the_cpu_like_the_parameters(
    optimizer_class: Callable[..., Optimizer],
) -> None:
    """The meta device stands for an accelerator: tensors that are not on the cpu."""

    def curve(device: str, *, has_states: bool) -> list[int]:
        model = deep_model().to(device)
        optimizer = optimizer_class(model.parameters(), lr=0.1, foreach=True)
        if has_states:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
        traced = trace_peak_memory(training_step(model, optimizer))
        return [traced.resting_bytes, *peaks(traced)]

    found = [curve(device, has_states=has_states) for device in ("cpu", "meta") for has_states in (False, True)]
    assert found == [found[0]] * 4


def test_an_optimizer_with_attributes_of_its_own_is_traced() -> None:
    class Scaled(torch.optim.SGD):
        def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
            super().__init__(parameters, lr)
            self.scale = 2.0

        def step(self, closure: None = None) -> None:  # type: ignore[override]
            assert self.scale == 2.0
            super().step()

    model = deep_model()
    optimizer = Scaled(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # replaces optimizer.step
    before = [p.detach().clone() for p in model.parameters()]
    assert trace_peak_memory(training_step(model, optimizer)).peak_bytes(2) > 0
    assert all(map(torch.equal, before, model.parameters()))


def test_a_loss_may_read_a_value_but_not_leave_torch_or_have_sizes_of_values() -> None:
    step = training_step(deep_model(), loss=lambda out: out.sum() / max(float(out.detach().abs().max()), 1.0))
    assert trace_peak_memory(step).peak_bytes(2) > 0
    for loss in (lambda out: out.sum() * float(out.detach().numpy().max()), lambda out: out.sum() * len(out.nonzero())):
        with pytest.raises(TraceError):
            trace_peak_memory(training_step(deep_model(), loss=loss))


def test_an_operation_that_torch_cannot_fake_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", logged.append)
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "handlers", [handler])

    def of_experts(out: torch.Tensor) -> torch.Tensor:  # its fake kernel takes bfloat16 alone
        ends = torch.tensor([1, 2], dtype=torch.int32)
        return nn.functional.grouped_mm(out, out.new_ones(2, out.shape[1], 16), offs=ends).sum()

    with pytest.raises(TraceError, match="RuntimeError: Expected inputs of BF16 type"):
        trace_peak_memory(training_step(deep_model(), loss=of_experts))
    assert not logged, "torch would log the traceback"


def test_a_mask_selects_all_that_there_is() -> None:
    model = nn.Linear(64, 512)
    step = step_of(
        model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=False),
        lambda out: out[torch.isfinite(out).all(-1)].square().mean(), lambda size: torch.randn(size, 32, 64),
    )  # fmt: skip
    check_against_a_real_step(step, (4, 64), rel=0.02)


def test_a_name_that_torch_no_longer_has_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, fake_step.__name__)
    monkeypatch.delattr(_trace, "fake_step")
    monkeypatch.delattr(torch._subclasses.fake_tensor, "FakeCopyMode")
    with pytest.raises(TraceError, match=r"ImportError: cannot import name 'FakeCopyMode' from [^\n]*$"):
        trace_peak_memory(training_step(deep_model()))


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (nn.Linear(4, 4), nn.Linear(4, 4), True),
        (nn.Linear(4, 4), nn.Linear(4, 4, bias=False), False),
        (nn.Dropout(0.1), nn.Dropout(0.2), False),
        (nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4), False),
    ],
)
def test_layers_that_compute_alike_are_compiled_once_and_others_are_not(
    one: nn.Module, other: nn.Module, alike: bool
) -> None:
    assert (compiled._likeness(one) == compiled._likeness(other)) is alike


@pytest.mark.parametrize(
    ("available", "initialized", "expected"), [(True, True, "cuda"), (False, False, "cpu"), (True, False, "cpu")]
)
def test_a_trace_fakes_cuda_only_where_it_cannot_end_the_process(
    available: bool, initialized: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeTensorMode():
        model: nn.Module = nn.ParameterList([torch.empty(4, device="cuda")])  # says so, and needs none
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    assert trace._device_of_trace(model).type == expected
    assert trace._device_of_trace(nn.Linear(4, 4)).type == "cpu"
    assert trace._device_of_trace(nn.ModuleList([model, nn.Linear(4, 4)])).type == "cpu", "on two devices"


def test_what_cannot_be_traced_on_the_device_is_traced_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    step = training_step(deep_model())
    expected = trace_peak_memory(step)
    record, devices = fake_step.record, []

    def fails_on_device(*args: Any, **noted: Any) -> Any:
        devices.append(args[-1].type)
        if args[-1].type != "cpu":
            raise NotImplementedError("no fake kernel")
        return record(*args, **noted)

    monkeypatch.setattr(fake_step, "record", fails_on_device)
    monkeypatch.setattr(trace, "_device_of_trace", lambda model: torch.device("cuda", 0))
    assert peaks(trace_peak_memory(step)) == peaks(expected)
    assert devices == ["cuda", "cpu", "cpu"]


def test_what_is_on_the_host_takes_no_memory_of_the_device() -> None:
    recorder = Recorder(device_type="cuda")
    with FakeTensorMode(), recorder:
        on_device = torch.empty(8, 8, device="cuda")  # 256 bytes
        on_host = on_device.to("cpu")
        assert on_host.device.type == "cpu"
        torch.zeros(100)
    assert max(recorder.record().log) == 256


@pytest.mark.parametrize("is_kept", [True, False])
def test_memory_that_a_result_is_written_over_is_free_once_both_are_dead(is_kept: bool) -> None:
    """Checkpointing of activations holds what it has computed again until the whole backward of a layer is over."""
    with FakeTensorMode(), Recorder() as recorder:
        recorder.begin()
        term = torch.ones(256)
        Recorder.in_place_of = term
        result = term + 1
        Recorder.in_place_of = None
        kept = [term] if is_kept else []
        del term, result
        after = torch.ones(1)
    assert recorder.record().log == (0, 1024, 1024, 1024 * len(kept) + after.nbytes)


class Tied(nn.Module):
    """Embeds tokens and multiplies by the same weight again, by parts of the text."""

    def __init__(self, parts: int, *, tied: bool) -> None:
        super().__init__()
        self.parts = parts
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.output = self.embedding if tied else nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        hidden = torch.tanh(self.embedding(tokens))
        return [functional.linear(part, self.output.weight) for part in hidden.chunk(self.parts, dim=1)]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("parts", [1, 2, 8])
def test_gradients_of_a_weight_that_is_used_often_take_what_a_real_step_takes(parts: int, tied: bool) -> None:
    model = Tied(parts, tied=tied)  # whose first sum is new, as the first gradient is a view; others are in place
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    step = step_of(model, optimizer, sum_of_squares, lambda b: torch.randint(VOCABULARY, (b, LENGTH)))
    check_against_a_real_step(step, (2, 10), rel=0.01)


def test_the_gradient_of_an_embedding_is_summed_by_parts_in_float32_on_cuda() -> None:
    length = 20  # whole bytes of each part
    model = nn.Embedding(VOCABULARY, WIDTH)
    step = step_of(model, None, lambda out: out.square().sum(), lambda b: torch.zeros(b, length, dtype=torch.long))
    curves = trace_peak_memory(replace(step, on_cuda=True)), trace_peak_memory(step)
    # At the least, each token is a part; a tenth more are there for tokens that are alike.
    tokens = 10 * length
    on_cuda, on_cpu = (curve.peak_bytes(10) - curve.resting_bytes for curve in curves)
    assert on_cuda - on_cpu == 11 * tokens * WIDTH * 4 // 10
