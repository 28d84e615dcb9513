from __future__ import annotations

import contextlib
import dataclasses
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from adaptive_batching import _state as state_module
from adaptive_batching._memory.meter import CpuMeter
from adaptive_batching._probe import trial as trial_module
from adaptive_batching._probe.probed_step import TrainingStep
from adaptive_batching._probe.trial import Trial
from adaptive_batching._values import ConfigError
from tests.support.changing import described, random_numbers

BUDGET = 2**40


class Model(nn.Module):
    """Dropout draws random numbers, batch norm changes buffers; ``fail_in`` raises where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 1))
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.fail_in = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layers[0](x)
        if self.fail_in == "forward":
            raise torch.OutOfMemoryError("out of memory in forward")
        if self.fail_in == "backward":
            hidden.register_hook(self._fail)
        return self.layers[1:](hidden).sum()

    def _fail(self, gradient: torch.Tensor) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")


class HalfwayOptimizer(torch.optim.AdamW):
    """Runs out of memory after half of the parameters have been updated, as a foreach optimizer can."""

    fail = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self.fail:
            super().step()
            return
        with torch.no_grad():
            for parameter in list(self.state)[:2]:
                parameter.add_(1.0)
                self.state[parameter]["exp_avg"].add_(1.0)
        self.param_groups[0]["lr"] = 7.0
        raise MemoryError


def training_step(model: Model, optimizer: Optimizer) -> TrainingStep:
    def run(batch: torch.Tensor) -> None:
        random.random(), np.random.rand()
        model.train()
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return TrainingStep(model, [optimizer], lambda batch_size: torch.randn(batch_size, 8), run)


class Training:
    """A model, an optimizer that is made of its parameters, and their step."""

    def __init__(self, make: Callable[..., Optimizer] = torch.optim.SGD, *, trained: bool = False) -> None:
        self.model = Model()
        self.optimizer = make(self.model.parameters())
        self.step = training_step(self.model, self.optimizer)
        if trained:
            self.step.run(torch.randn(4, 8))

    @property
    def num_trained(self) -> int:
        return sum(parameter.requires_grad for parameter in self.model.parameters())

    def everything(self) -> Any:
        """All that a step can change, bit for bit, signs of zeros and NaN included."""
        gradients = [parameter.grad for parameter in self.model.parameters()]
        modes = [module.training for module in self.model.modules()]
        return described([self.model.state_dict(), gradients, modes, self.optimizer.state_dict()]), random_numbers()

    @contextlib.contextmanager
    def left_without_a_trace(self) -> Iterator[None]:
        before = self.everything()
        yield
        assert self.everything() == before


@pytest.mark.parametrize("fail_in", ["", "forward", "backward", "optimizer"])
@pytest.mark.parametrize("trained_before", [False, True])
def test_a_trial_leaves_no_trace_wherever_it_runs_out_of_memory(fail_in: str, trained_before: bool) -> None:
    torch.manual_seed(1)
    training = Training(partial(HalfwayOptimizer, lr=0.1), trained=trained_before)
    model, optimizer = training.model, training.optimizer
    with torch.no_grad():
        model.layers[0].weight[0, :2] = torch.tensor([-0.0, torch.nan])  # type: ignore[operator]  # bits that arithmetic would not keep
    model.layers[2].eval()
    with training.left_without_a_trace(), Trial(training.step, CpuMeter(), BUDGET) as trial:
        assert trial.measure(3).fits
        model.fail_in, optimizer.fail = fail_in, fail_in == "optimizer"  # type: ignore[attr-defined]
        measurement = trial.measure(5)
        assert measurement.fits == (not fail_in)
        assert (measurement.peak_bytes is None) == bool(fail_in)
        model.fail_in, optimizer.fail = "", False  # type: ignore[attr-defined]
        assert trial.measure(2).fits, "a trial works after one that ran out of memory"


def test_other_errors_come_through_and_leave_no_trace_either() -> None:
    training = Training(partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    with (
        training.left_without_a_trace(),
        pytest.raises(RuntimeError, match="shapes"),
        Trial(training.step, CpuMeter(), BUDGET) as trial,
    ):
        trial.measure(2)
        training.step.run(torch.randn(2, 9))


def test_a_step_over_budget_does_not_fit_although_it_ran() -> None:
    class Meter(CpuMeter):
        def limit(self, num_bytes: int) -> Any:
            return nullcontext()  # a device that enforces nothing

    with Trial(Training().step, Meter(), budget_bytes=2**20) as trial:
        measurement = trial.measure(2)
    assert not measurement.fits
    assert measurement.peak_bytes is not None and measurement.peak_bytes > 2**20


def test_only_buffers_and_what_the_optimizers_step_are_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A teacher's parameters say that they want gradients, and no optimizer has them."""
    saved: list[list[int]] = []
    keep = trial_module.kept_aside

    def note(tensors: Sequence[torch.Tensor], scratch: Path | None) -> Any:
        saved.append([each.data_ptr() for each in tensors])
        return keep(tensors, scratch)

    monkeypatch.setattr(trial_module, "kept_aside", note)
    monkeypatch.setattr(state_module, "_COPIED_PARAMETERS", 0)  # as of a large model: others are only compared
    training, teacher = Training(), Model()
    student = training.model
    with Trial(dataclasses.replace(training.step, model=nn.ModuleList([student, teacher])), CpuMeter(), BUDGET):
        pass
    with Trial(TrainingStep(teacher, [], range, lambda _: None), CpuMeter(), BUDGET):
        pass
    stepped = Training(torch.optim.AdamW, trained=True)
    with Trial(dataclasses.replace(stepped.step, updates=False), CpuMeter(), BUDGET):
        pass
    with Trial(dataclasses.replace(training.step, updates=False), CpuMeter(), BUDGET):  # makes states by a step
        pass
    trained = [parameter for parameter in student.parameters() if parameter.requires_grad]
    assert any(parameter.requires_grad for parameter in teacher.parameters())
    of_student = [*trained, *student.buffers()]
    expected = [[*of_student, *teacher.buffers()], [*teacher.buffers()], [*stepped.model.buffers()], of_student]
    assert saved == [[each.data_ptr() for each in tensors] for tensors in expected]


def test_what_the_host_has_no_room_for_goes_to_a_disk_that_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(torch.optim.AdamW, trained=True)
    full = Path(tempfile.gettempdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0 if path == full else 2**40))
    trial = Trial(training.step, CpuMeter(), BUDGET, tmp_path / "not" / "there" / "yet")
    with training.left_without_a_trace(), caplog.at_level("INFO"), trial:
        assert trial.measure(3).fits
    assert f"in a file in {tmp_path}" in caplog.text

    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2))
    message = r"has to save 0\.0 MiB .*, but .* has 0\.0 MiB free; set .* TMPDIR"
    with training.left_without_a_trace(), pytest.raises(ConfigError, match=message):
        Trial(training.step, CpuMeter(), BUDGET, tmp_path).__enter__()


def test_a_disk_that_fills_while_the_snapshot_is_written_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(torch.optim.AdamW)
    full = Path("/dev/full").open("wb")  # noqa: SIM115 (the snapshot closes it)
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: full)
    message = r"cannot save weights and optimizer states in .* TMPDIR"
    with training.left_without_a_trace(), pytest.raises(ConfigError, match=message):
        Trial(training.step, CpuMeter(), BUDGET).__enter__()


@pytest.mark.parametrize(("free", "in_file"), [(2**40, False), (3, True)])
def test_copies_of_a_device_stay_on_the_host_where_it_has_room(
    free: int, in_file: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OnDevice(torch.Tensor):
        """Says that it is on a device."""

        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return torch.device("cuda", 0)

    weights = torch.randn(5).as_subclass(OnDevice)
    values = torch.tensor(weights.tolist())
    monkeypatch.setattr(trial_module, "free_host_bytes", lambda: free)
    written: list[Any] = []
    write = trial_module._write

    def note(file: Any, tensor: torch.Tensor) -> None:
        written.append(tensor)
        write(file, tensor)

    monkeypatch.setattr(trial_module, "_write", note)
    with trial_module.kept_aside([weights], None):
        assert bool(written) == in_file
        weights.zero_()
    assert torch.equal(weights.as_subclass(torch.Tensor), values)


class Releasing(CpuMeter):
    """Notes what ``held`` returns at each release."""

    def __init__(self, held: Callable[[], int] = lambda: 0) -> None:
        super().__init__()
        self.held = held
        self.released: list[int] = []

    def release(self) -> None:
        self.released.append(self.held())
        super().release()


@pytest.mark.parametrize("trained_before", [False, True])
def test_a_size_begins_as_training_does_with_states_that_its_first_step_makes(trained_before: bool) -> None:
    training = Training(torch.optim.AdamW, trained=trained_before)
    found: list[int] = []
    training.model.register_forward_pre_hook(lambda module, args: found.append(len(training.optimizer.state)))
    meter = Releasing()
    with training.left_without_a_trace(), Trial(training.step, meter, BUDGET) as trial:
        assert len(training.optimizer.state) == training.num_trained, "they are there before the first step"
        makes_states = [trial.measure(3).makes_states, trial.begin(3).makes_states]
        before = len(meter.released)
        makes_states.append(trial.go_on(3).makes_states)
        assert len(meter.released) == before, "another step runs on what the first has left"
        trial.begin(5)
        trial.measure(4)
        assert len(meter.released) == before + 2
    all_of_them = training.num_trained
    begun = all_of_them if trained_before else 0
    assert found == [all_of_them, begun, all_of_them, begun, all_of_them]
    assert makes_states == [False, not trained_before, False]


def test_what_a_step_that_ran_out_leaves_behind_is_gone_before_memory_is_released() -> None:
    """As activations that a context has moved to the host: it knows of them until it is told to forget."""
    stash: list[torch.Tensor] = []
    training, meter = Training(), Releasing(lambda: len(stash))
    with Trial(dataclasses.replace(training.step, discard=stash.clear), meter, BUDGET) as trial:
        training.model.fail_in = "backward"
        training.model.layers[0].register_forward_hook(lambda module, args, output: stash.append(output.detach()))
        assert not trial.measure(3).fits
        assert meter.released[-1] == 0 and stash == []


def test_a_step_that_another_rank_cannot_begin_is_not_begun() -> None:
    """The others would wait in its collectives for the rank that had no memory for the batch."""
    training = Training()
    began: list[int] = []
    training.model.register_forward_pre_hook(lambda module, args: began.append(1))
    with Trial(training.step, CpuMeter(), BUDGET, all_ready=lambda here: False) as trial:
        measured = trial.measure(3)
    assert (measured.fits, measured.peak_bytes, began) == (False, None, [])


def test_a_folder_in_memory_has_no_more_room_than_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(trial_module, "free_host_bytes", lambda: 2**20)
    mounts = f"/dev/sda / ext4 rw 0 0\ntmpfs {tmp_path} tmpfs rw 0 0\n"
    read_text = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda path, *args: mounts if path == Path("/proc/mounts") else read_text(path, *args)
    )
    assert trial_module._free_bytes(tmp_path) == 2**19
    assert trial_module._free_bytes(tmp_path.parent) > 2**20
