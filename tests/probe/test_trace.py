from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._pytree import tree_iter

from adaptive_batching._probe.trial import TrainingStep
from adaptive_batching._trace import compiled, fake_step, trace
from adaptive_batching._trace.compiled import compile_modules
from adaptive_batching._trace.recorder import Recorder
from adaptive_batching._trace.trace import trace_peak_memory
from adaptive_batching._trace.traced_step import PeakMemoryCurve, TraceError

WIDTH = 64


def training_step(model: nn.Module, optimizer: Optimizer, loss: Callable[[torch.Tensor], torch.Tensor]) -> TrainingStep:
    def bind(model: nn.Module, optimizers: Sequence[Optimizer]) -> Callable[[torch.Tensor], None]:
        def run(batch: torch.Tensor) -> None:
            loss(model(batch)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

        return run

    return TrainingStep(model, [optimizer], lambda batch_size: torch.randn(batch_size, WIDTH), bind)


def deep_model() -> nn.Module:
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())])


def real_bytes(model: nn.Module, optimizer: Optimizer) -> int:
    states = [v for v in tree_iter(list(optimizer.state.values())) if isinstance(v, torch.Tensor)]
    return sum(t.nbytes for t in [*model.parameters(), *states])


def test_the_curve_is_the_largest_line() -> None:
    # at rest 10; operations: 100 + 0 b, 20 + 30 b
    curve = PeakMemoryCurve([10, 100, 80], [10, 100, 110])
    assert [curve.peak_bytes(b) for b in (1, 2, 3, 4, 10)] == [100, 100, 110, 140, 320]
    assert curve.resting_bytes == 10


def test_traces_of_different_length_are_refused() -> None:
    with pytest.raises(TraceError, match="3 operations at b=2 and 2 at b=3"):
        PeakMemoryCurve([1, 2, 3], [1, 2])


def test_predicted_bytes_at_rest_are_those_of_parameters_and_optimizer_states() -> None:
    model = deep_model()
    optimizer = torch.optim.AdamW(model.parameters())
    step = training_step(model, optimizer, torch.sum)
    curve = trace_peak_memory(step)
    step.bind(model, [optimizer])(step.make_batch(2))
    assert curve.resting_bytes == real_bytes(model, optimizer)


@pytest.mark.parametrize("trained_before", [False, True])
def test_a_trace_changes_nothing_and_is_the_same_before_and_after_the_first_step(trained_before: bool) -> None:
    model = deep_model()
    optimizer = torch.optim.AdamW(model.parameters())
    step = training_step(model, optimizer, torch.sum)
    if trained_before:
        step.bind(model, [optimizer])(step.make_batch(2))
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    random_state = torch.get_rng_state()
    first = trace_peak_memory(step)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    assert str(optimizer.state_dict()) == str(state)
    step.bind(model, [optimizer])(step.make_batch(2))
    second = trace_peak_memory(step)
    assert [first.peak_bytes(b) for b in (2, 50)] == [second.peak_bytes(b) for b in (2, 50)]


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD])
def test_states_on_a_device_are_traced_on_the_cpu_like_the_parameters(
    optimizer_class: Callable[..., Optimizer],
) -> None:
    """The meta device stands for an accelerator: tensors that are not on the cpu."""

    def curve(device: str, *, has_states: bool) -> list[int]:
        model = deep_model().to(device)
        optimizer = optimizer_class(model.parameters(), lr=0.1, foreach=True, **momentum)
        if has_states:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
        traced = trace_peak_memory(training_step(model, optimizer, torch.sum))
        return [traced.resting_bytes, traced.peak_bytes(2), traced.peak_bytes(500)]

    momentum = {"momentum": 0.9} if optimizer_class is torch.optim.SGD else {}
    expected = curve("cpu", has_states=False)
    assert (
        curve("cpu", has_states=True) == curve("meta", has_states=True) == curve("meta", has_states=False) == expected
    )


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
    assert trace_peak_memory(training_step(model, optimizer, torch.sum)).peak_bytes(2) > 0
    assert all(map(torch.equal, before, model.parameters()))


def test_memory_of_large_batches_grows_by_the_activations() -> None:
    model = deep_model()
    curve = trace_peak_memory(training_step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.sum))
    per_sample = curve.peak_bytes(2001) - curve.peak_bytes(2000)
    # The most is alive when the last GELU has run: 4 outputs of linear layers and 4 of GELUs, of WIDTH floats each.
    assert per_sample == 8 * WIDTH * 4
    # At small sizes the gradients set the peak: only the batch itself grows.
    assert curve.peak_bytes(3) - curve.peak_bytes(2) == WIDTH * 4


def test_what_hangs_on_the_data_does_not_end_the_trace_but_what_is_foreign_does() -> None:
    model = deep_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def reads_a_value(out: torch.Tensor) -> torch.Tensor:
        return out.sum() / max(float(out.detach().abs().max()), 1.0)

    def leaves_torch(out: torch.Tensor) -> torch.Tensor:
        return out.sum() * float(out.detach().numpy().max())

    def sizes_hang_on_values(out: torch.Tensor) -> torch.Tensor:
        return out[out > 0].sum()

    assert trace_peak_memory(training_step(model, optimizer, reads_a_value)).peak_bytes(2) > 0
    for loss in (leaves_torch, sizes_hang_on_values):
        with pytest.raises(TraceError):
            trace_peak_memory(training_step(model, optimizer, loss))


def test_what_if_a_change_were_made_to_the_model() -> None:
    model = deep_model()

    def freeze(copied: nn.Module) -> None:
        for parameter in list(copied.parameters())[:-1]:
            parameter.requires_grad_(False)

    step = training_step(model, torch.optim.AdamW(model.parameters()), torch.sum)
    assert trace_peak_memory(step, freeze).peak_bytes(2) < trace_peak_memory(step).peak_bytes(2)
    assert all(p.requires_grad for p in model.parameters())


def of_layers(layers: list[nn.Module]) -> nn.Module:
    """A model that multiplies between its pointwise operations."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = (x + 1) * (x + 2)  # fused into what reads it, or computed again
            return torch.tanh(h @ self.weight) * 2

    return nn.Sequential(*(Gated() for _ in layers))


def test_a_compiled_layer_keeps_what_the_minimal_cut_keeps() -> None:
    model = of_layers([nn.Identity()] * 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    eager = training_step(model, optimizer, torch.sum)
    bind = eager.bind

    def bind_compiled(model: nn.Module, optimizers: Sequence[Optimizer]) -> Callable[[torch.Tensor], None]:
        compile_modules(model.children())
        return bind(model, optimizers)

    per_sample = [
        (lambda curve: curve.peak_bytes(5001) - curve.peak_bytes(5000))(trace_peak_memory(step))
        for step in (eager, replace(eager, bind=bind_compiled, compiles=True))
    ]
    row = WIDTH * 4
    # Of each layer its input, its product and its output's factor are read again: the input is the last layer's output.
    assert per_sample[1] < per_sample[0]
    assert per_sample[1] <= (1 + 3 * 2 + 2) * row


def test_layers_that_compute_alike_are_compiled_once_and_others_are_not() -> None:
    likeness = compiled._likeness
    assert likeness(nn.Linear(4, 4)) == likeness(nn.Linear(4, 4))
    assert likeness(nn.Linear(4, 4)) != likeness(nn.Linear(4, 4, bias=False))
    assert likeness(nn.Dropout(0.1)) != likeness(nn.Dropout(0.2))
    assert likeness(nn.Linear(4, 4).requires_grad_(False)) != likeness(nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("available", "initialized", "expected"),
    [(True, True, "cuda"), (False, False, "cpu"), (True, False, "cpu")],
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
    model = deep_model()
    step = training_step(model, torch.optim.AdamW(model.parameters()), torch.sum)
    expected = trace_peak_memory(step)
    record, devices = fake_step.record, []

    def fails_on_device(*args: Any) -> Any:
        devices.append(args[-1].type)
        if args[-1].type != "cpu":
            raise NotImplementedError("no fake kernel")
        return record(*args)

    monkeypatch.setattr(fake_step, "record", fails_on_device)
    monkeypatch.setattr(trace, "_device_of_trace", lambda model: torch.device("cuda", 0))
    found = trace_peak_memory(step)
    assert devices == ["cuda", "cpu", "cpu"]
    assert [found.peak_bytes(size) for size in (2, 50)] == [expected.peak_bytes(size) for size in (2, 50)]


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
