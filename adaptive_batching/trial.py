"""Run real training steps to see what they take, and leave no trace of them.

One exception: the states of a paged optimizer (bitsandbytes) live in memory that can never be given back. Where a trial
has to make them, they are made as the optimizer would make them, and stay, at their first values.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from adaptive_batching.config import ConfigError
from adaptive_batching.memory import MemoryMeter, free_host_bytes, is_out_of_memory
from adaptive_batching.search import Measurement

log = logging.getLogger(__name__)

Run = Callable[[Any], None]


@dataclass(frozen=True)
class TrainingStep:
    """One optimizer step of a training program, as the probe and the trace run it."""

    model: nn.Module
    optimizers: Sequence[Optimizer]
    """One; several where each parameter has its own, as with optimizers stepped in the backward pass."""

    make_batch: Callable[[int], Any]
    """Batch size -> a batch of that many worst-case samples, as the loader would collate it."""

    bind: Callable[[nn.Module, Sequence[Optimizer]], Run]
    """(model, optimizers) -> a function that takes a batch through forward, backward, gradient clipping and the
    optimizer step, and leaves no gradients behind. The trace binds copies, the trial the originals."""

    discard: Callable[[], None] = lambda: None
    """Drop what a step that broke off has left behind, other than gradients."""


class Trial:
    """A context in which training steps run for real, and after which nothing has changed.

    On entry, everything that a step can change is put aside: trainable parameters, buffers, optimizer states and
    settings, training mode, and the state of every random number generator. Optimizer states are then made to exist,
    because a step needs memory beside them. On exit everything is put back, bit for bit, however a step ended.

    Args:
        step: The training step to run.
        meter: Reads and bounds the memory of the device that the step runs on.
        budget_bytes: Peak memory that a step may take.
        scratch: A folder with room for what is put aside, should neither the host's memory nor the folder for
            temporary files have it.
        all_ready: Told whether this rank has the batch for a step; says whether all ranks do. A step that one of them
            cannot begin is begun by none.
        stopped_at_bytes: Memory at which a step is broken off; None for the budget. One that takes more than the budget
            but less than that runs to its end, and does not fit.

    Raises:
        ConfigError: On entry, where there is no room for what is put aside.
        torch.OutOfMemoryError, RuntimeError: On entry, where not even the optimizer states fit; see
            :func:`~adaptive_batching.memory.is_out_of_memory`.
    """

    def __init__(
        self,
        step: TrainingStep,
        meter: MemoryMeter,
        budget_bytes: int,
        scratch: Path | None = None,
        all_ready: Callable[[bool], bool] = lambda here: here,
        stopped_at_bytes: int | None = None,
    ) -> None:
        self._all_ready = all_ready
        self._stopped_at_bytes = stopped_at_bytes
        self._step = step
        self._meter = meter
        self.budget_bytes = budget_bytes
        self._scratch = scratch
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Trial:
        with contextlib.ExitStack() as stack:
            stack.callback(self._meter.release)
            stack.callback(self._step.discard)
            stack.enter_context(unchanged_random_state(self._meter.device))
            _make_states_that_stay(self._step.optimizers)
            stack.enter_context(_unchanged(self._step.model, self._step.optimizers, self._scratch))
            self._meter.release()
            with self._meter.limit(self._limit_bytes):
                self._make_optimizer_states()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def measure(self, batch_size: int) -> Measurement:
        """Run one full training step at ``batch_size``, with the allocator's cache empty, and say what it took.

        Raises:
            Exception: Whatever the step raises, other than running out of memory.
        """
        self._clear()
        return self._measure(batch_size)

    def measure_again(self, batch_size: int) -> Measurement:
        """Run a step at the size that ran last, on the cache that it has left, as steps of training follow each other.

        Raises:
            Exception: Whatever the step raises, other than running out of memory.
        """
        return self._measure(batch_size)

    def _measure(self, batch_size: int) -> Measurement:
        run = self._step.bind(self._step.model, self._step.optimizers)
        self._meter.reset_peak()
        retries_before = self._meter.num_retries()
        start = time.perf_counter()
        batches: list[Any] = []
        ran_out = self._runs_out(lambda: batches.append(self._step.make_batch(batch_size)))
        # A rank that has no batch would leave the others waiting in the step's collectives.
        ran_out = not self._all_ready(not ran_out) or self._runs_out(lambda: self._run(run, batches.pop()))
        # Clean up here, outside of the except block: the traceback holds the step's tensors.
        seconds = time.perf_counter() - start
        retries = self._meter.num_retries() - retries_before
        peak_bytes = None if ran_out else self._meter.peak_bytes()
        overhead = 1.0 if peak_bytes is None else max(peak_bytes / max(self._meter.peak_allocated_bytes(), 1), 1.0)
        if ran_out:
            self._clear()
        self._drop_gradients()
        fits = peak_bytes is not None and peak_bytes <= self.budget_bytes and retries == 0
        took = "out of memory" if peak_bytes is None else f"peak {peak_bytes / 2**20:,.0f} MiB"
        strained = f", the allocator had to empty its cache {retries} times" if retries and not ran_out else ""
        log.info("trial step at batch size %d: %s, %.1f s%s", batch_size, took, seconds, strained)
        return Measurement(batch_size, fits, peak_bytes, seconds, overhead, retries)

    def _run(self, run: Run, batch: Any) -> None:
        run(batch)
        self._meter.synchronize()

    def _runs_out(self, function: Callable[[], None]) -> bool:
        """Call ``function`` within the budget, and return whether it ran out of memory."""
        try:
            with self._meter.limit(self._limit_bytes):
                function()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return True
        return False

    @property
    def _limit_bytes(self) -> int:
        return self.budget_bytes if self._stopped_at_bytes is None else self._stopped_at_bytes

    def _clear(self) -> None:
        self._step.discard()
        self._drop_gradients()
        self._meter.release()

    def _drop_gradients(self) -> None:
        for parameter in self._step.model.parameters():
            parameter.grad = None

    def _make_optimizer_states(self) -> None:
        """Step each optimizer once on zero gradients: the states get their memory without a forward pass."""
        for optimizer in self._step.optimizers:
            if has_states(optimizer):
                continue
            parameters = _trainable(optimizer)
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            for parameter in parameters:
                parameter.grad = None


def _make_states_that_stay(optimizers: Sequence[Optimizer]) -> None:
    """Make the states of paged optimizers, at their first values.

    They are managed memory, which bitsandbytes never frees: dropped after the probe, they would be lost, and training
    would make them a second time.
    """
    for optimizer in optimizers:
        if not getattr(optimizer, "is_paged", False) or not hasattr(optimizer, "init_state"):
            continue
        for group_index, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                if parameter.requires_grad and not optimizer.state[parameter]:
                    optimizer.init_state(group, parameter, group_index, index)


def has_states(optimizer: Optimizer) -> bool:
    """True if ``optimizer`` has made the states of all its parameters, as it does in its first step."""
    return all(parameter in optimizer.state for parameter in _trainable(optimizer))


def _trainable(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


@contextlib.contextmanager
def unchanged_random_state(device: torch.device) -> Iterator[None]:
    """Restore the random state of Python, numpy and torch, on the cpu and on ``device``."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    on_cpu = device.type == "cpu"
    try:
        with torch.random.fork_rng([] if on_cpu else [device], device_type="cuda" if on_cpu else device.type):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@contextlib.contextmanager
def _unchanged(model: nn.Module, optimizers: Sequence[Optimizer], scratch: Path | None) -> Iterator[None]:
    """Restore trainable parameters, buffers, gradients, training mode and all of the optimizers, bit for bit."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = [p.grad for p in parameters]
    modes = [(module, module.training) for module in model.modules()]
    states = [{p: dict(state) for p, state in optimizer.state.items()} for optimizer in optimizers]
    groups = [
        [{k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        for optimizer in optimizers
    ]
    in_states = [v for state in states for entry in state.values() for v in entry.values()]
    tensors = [*parameters, *model.buffers(), *(v for v in in_states if isinstance(v, torch.Tensor))]
    with _Aside(tensors, scratch) as aside:
        aside.put(tensors)
        try:
            yield
        finally:
            aside.restore(tensors)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            for module, training in modes:
                module.training = training
            for optimizer, state, saved_groups in zip(optimizers, states, groups, strict=True):
                optimizer.state.clear()
                optimizer.state.update(state)
                for group, saved in zip(optimizer.param_groups, saved_groups, strict=True):
                    for key in [k for k in group if k != "params" and k not in saved]:
                        del group[key]
                    group.update(saved)


class _Aside:
    """Copies of tensors, kept where they take no memory of the device: on the host, or for host tensors in a file.

    Copies of a device's tensors go to a file, too, where the host's memory is short.

    Args:
        tensors: What is going to be put aside.
        scratch: A folder for the file, should that for temporary files have no room.

    Raises:
        ConfigError: If there is no room in either.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], scratch: Path | None) -> None:
        local = [_local(tensor) for tensor in tensors]
        on_host = sum(tensor.nbytes for tensor in local if tensor.device.type == "cpu")
        on_device = sum(tensor.nbytes for tensor in local) - on_host
        # Training needs memory of the host as well: for its data, and for pinned copies.
        self._device_to_file = on_device > free_host_bytes() // 2
        in_file = on_host + (on_device if self._device_to_file else 0)
        folder = _folder_with_room(in_file, scratch)
        where = f"{_gib(in_file)} in a file in {folder}, {_gib(on_device + on_host - in_file)} in the host's memory"
        log.info("weights and optimizer states are put aside while probing: %s", where)
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (closed on exit)
        self._folder = folder
        self._copies: list[torch.Tensor | int] = []

    def __enter__(self) -> _Aside:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):  # what could not be written is of no use any more
            self._file.close()
        self._copies.clear()

    @torch.no_grad()
    def put(self, tensors: Sequence[torch.Tensor]) -> None:
        try:
            for tensor in map(_local, tensors):
                if tensor.device.type != "cpu" and not self._device_to_file:
                    self._copies.append(tensor.detach().to("cpu", copy=True))
                else:
                    self._copies.append(self._file.tell())
                    self._file.write(_as_bytes(tensor.cpu()))
            self._file.flush()
        except OSError as error:  # another process has filled the disk meanwhile
            raise ConfigError(
                f"the probe cannot put weights and optimizer states aside in {self._folder} ({error}); set the "
                f"environment variable TMPDIR to a folder on a larger disk"
            ) from None

    @torch.no_grad()
    def restore(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor, saved in zip(map(_local, tensors), self._copies, strict=True):
            if isinstance(saved, torch.Tensor):
                tensor.detach().copy_(saved)
                continue
            self._file.seek(saved)
            raw = torch.from_numpy(np.fromfile(self._file, np.uint8, tensor.nbytes))
            tensor.detach().copy_(raw.view(tensor.dtype).reshape(tensor.shape))


def _folder_with_room(num_bytes: int, scratch: Path | None) -> Path:
    """The folder for temporary files, or ``scratch`` where that has no room for ``num_bytes`` of each rank here."""
    num_bytes *= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    folders = [Path(tempfile.gettempdir()), *([] if scratch is None else [_existing(scratch)])]
    for folder in folders:
        if _free_bytes(folder) > num_bytes:
            return folder
    tried = ", ".join(f"{folder} has {_gib(_free_bytes(folder))} free" for folder in folders)
    raise ConfigError(
        f"the probe puts {_gib(num_bytes)} of weights and optimizer states aside, and {tried}; set the environment "
        f"variable TMPDIR to a folder on a larger disk"
    )


def _free_bytes(folder: Path) -> int:
    """Bytes that a file in ``folder`` can take; in one that lives in the host's memory, half of what is free there."""
    free = shutil.disk_usage(folder).free
    mounts = Path("/proc/mounts")
    lines = [line.split() for line in mounts.read_text().splitlines()] if mounts.exists() else []
    # (mount point, type), the one that the folder is in
    kinds = [(point, kind) for _, point, kind, *_ in lines if folder.resolve().is_relative_to(point)]
    _, kind = max(kinds, key=lambda mount: len(mount[0]), default=("", ""))
    return min(free, free_host_bytes() // 2) if kind in ("tmpfs", "ramfs") else free


def _existing(folder: Path) -> Path:
    """``folder``, or the nearest of those above it that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of ``tensor``."""
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


def _as_bytes(tensor: torch.Tensor) -> Any:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
