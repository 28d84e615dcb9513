"""Run real training steps to measure what they take, and restore all state afterwards.

There is one exception: the states of a paged optimizer (bitsandbytes) live in memory that can never be freed. A trial
that has to create them does so as the optimizer would, and they stay, at their initial values.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from adaptive_batching._device import RandomState
from adaptive_batching._memory.meter import MemoryMeter, free_host_bytes
from adaptive_batching._memory.out_of_memory import is_out_of_memory
from adaptive_batching._memory.unused_memory import keep_little_on_the_host
from adaptive_batching._probe.paged_states import make_paged_states, set_to_zero
from adaptive_batching._probe.probed_step import TrainingStep
from adaptive_batching._probe.sizes import Measurement
from adaptive_batching._state import Saved, State, parameters_of
from adaptive_batching._undeclared import reporting
from adaptive_batching._values import DRY_RUN, ConfigError, first_line, memory_size

log = logging.getLogger(__name__)

probing = False
"""True while steps run that :func:`unchanged` undoes, for those who count steps of training."""

_BYTES_AT_ONCE = 2**24


class Trial:
    """Context that runs real training steps and restores all state on exit, bit for bit, however a step ended.

    On entry optimizer states are created, because a step needs memory in addition to them; out of memory if not even
    they fit. Training makes them in its first step, in memory that this step has freed. With an allocator that keeps
    freed memory, that is another layout, which :meth:`begin` brings about.

    ``all_ready`` takes True if this rank has the batch for a step, and returns True if all ranks do: if one cannot
    begin a step, none does. A step is aborted at ``stopped_at_bytes``, None for the budget; one that takes more than
    the budget but less than this runs to its end, and does not fit.
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
        self._step, self._meter, self._scratch, self._all_ready = step, meter, scratch, all_ready
        self.budget_bytes, self._stopped_at_bytes = budget_bytes, stopped_at_bytes
        self._made: list[tuple[Optimizer, torch.Tensor]] = []  # of whom training will make states
        self._has_begun = False
        self._stack = contextlib.ExitStack()
        self.failure = ""
        """The last error by which a step ran out of memory on this rank."""

    def __enter__(self) -> Trial:
        with contextlib.ExitStack() as stack:
            stack.callback(self._meter.release)
            stack.callback(self._step.discard)
            stack.callback(RandomState(self._meter.device).put_back)
            # Those that a trial steps, if only to make their states.
            stepped = [one for one in self._step.optimizers if self._step.updates or not has_states(one)]
            stack.enter_context(unchanged(self._step.model, stepped, self._scratch, self._step.state))
            self._meter.release()
            if self._meter.device.type == "cpu":
                keep_little_on_the_host()
            with self._limited():
                self._make_optimizer_states()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def measure(self, batch_size: int) -> Measurement:
        """Run one full training step at ``batch_size`` with an empty allocator cache."""
        self._clear(states=self._has_begun)
        self._has_begun = False
        return self.go_on(batch_size)

    def begin(self, batch_size: int) -> Measurement:
        """Run a step as the first one of training does, which makes the optimizer states."""
        self._clear(states=True)
        self._has_begun = True
        return replace(self.go_on(batch_size), makes_states=bool(self._made))

    def go_on(self, batch_size: int) -> Measurement:
        """Run a step at the size that ran last, on the cache that it left, as consecutive steps of training do."""
        meter = self._meter
        meter.reset_peak()
        retries_before = meter.num_retries()
        start = time.perf_counter()
        batch, is_ready, has_run = None, False, False
        with self._as_far_as_memory_lasts():
            if not self._has_begun:
                self._make_optimizer_states()
            batch = self._step.make_batch(batch_size)
            is_ready = True
        # A rank without a batch would leave the others waiting in the step's collectives.
        if self._all_ready(is_ready):
            with self._as_far_as_memory_lasts():
                self._step.run(batch)
                meter.synchronize()
                has_run = True
        # Clean up here, outside the except block: the traceback keeps the step's tensors alive.
        del batch
        seconds = time.perf_counter() - start
        retries = meter.num_retries() - retries_before
        peak_bytes = meter.peak_bytes() if has_run else None
        if not has_run:
            self._clear()
        self._drop_gradients()
        gc.collect()  # compilers leave tensors behind in circles, which a second step must not meet
        fits = peak_bytes is not None and peak_bytes <= self.budget_bytes
        took = "out of memory" if peak_bytes is None else f"peak {memory_size(peak_bytes)}"
        strained = f", the allocator had to empty its cache {retries} times" if retries and has_run else ""
        log.info("batch size %d: %s, %.1f s%s", batch_size, took, seconds, strained)
        in_use_bytes = meter.peak_allocated_bytes() if has_run else None
        return Measurement(batch_size, fits, peak_bytes, seconds, retries, in_use_bytes=in_use_bytes)

    @contextlib.contextmanager
    def _as_far_as_memory_lasts(self) -> Iterator[None]:
        """Run what is inside up to where memory runs out, and go on after it; :attr:`failure` then has the error."""
        try:
            with self._limited():
                yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            cause = error.__cause__  # of an error that says that one rank of several ran out
            self.failure = first_line(cause if isinstance(cause, Exception) else error)

    def _limited(self) -> contextlib.AbstractContextManager[None]:
        return self._meter.limit(self.budget_bytes if self._stopped_at_bytes is None else self._stopped_at_bytes)

    def _clear(self, *, states: bool = False) -> None:
        for optimizer, parameter in self._made if states else ():
            optimizer.state.pop(parameter, None)
        self._step.discard()  # first: of a unit that is still gathered, gradients are out of reach
        self._drop_gradients()
        self._meter.release()

    def _drop_gradients(self) -> None:
        for parameter in parameters_of(self._step.model, self._step.optimizers):
            parameter.grad = None

    def _make_optimizer_states(self) -> None:
        """Step each optimizer once on zero gradients, to allocate the states without a forward pass."""
        for optimizer in self._step.optimizers:
            if has_states(optimizer):
                continue
            parameters = trainable(optimizer)
            for parameter in parameters:
                if parameter not in optimizer.state:
                    self._made.append((optimizer, parameter))
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            for parameter in parameters:
                parameter.grad = None


def has_states(optimizer: Optimizer) -> bool:
    """Return True if ``optimizer`` has created the states of all its parameters, as its first step does."""
    return optimizer.state.keys() >= {*trainable(optimizer)}


def trainable(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


@contextlib.contextmanager
def unchanged(
    model: nn.Module, optimizers: Sequence[Optimizer], scratch: Path | None, state: State | None = None
) -> Iterator[None]:
    """Restore what steps of ``optimizers`` change of their states, of ``model`` and of ``state``, on exit, bit for bit.

    States of paged optimizers that are not there yet are made, and set to their first values on exit.
    """
    stepped: dict[torch.Tensor, None] = {}
    for optimizer in optimizers:
        stepped.update(dict.fromkeys(trainable(optimizer)))
    state = State([model]) if state is None else state
    parameters = list(dict.fromkeys((*parameters_of(model, optimizers), *state.parameters)))
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    paged = make_paged_states(optimizers)
    saved = Saved(state, parameters, optimizers=optimizers, elsewhere=[*stepped, *paged])
    copied = [*stepped]
    for kept in saved.kept:
        copied += kept.parts
    global probing
    # What is put back is none of what is reported.
    with reporting(state, *optimizers), kept_aside(copied, scratch), without_hooks(optimizers):
        probing = True
        try:
            yield
        finally:
            probing = False
            set_to_zero(paged)
            torch.clear_autocast_cache()  # copies of a trial's weights, in a caller's context
            for parameter, gradient in gradients:
                parameter.grad = gradient
            saved.put_back()
    saved.check()


@contextlib.contextmanager
def without_hooks(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Step ``optimizers`` inside without the hooks that somebody has registered: they count steps, or log them."""
    hooks: list[Any] = [torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks]
    for wrapped in optimizers:  # Accelerate's and Fabric's wrap one
        for optimizer in (wrapped, getattr(wrapped, "optimizer", None), getattr(wrapped, "_optimizer", None)):
            own = getattr(optimizer, "__dict__", {})
            for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
                if name in own:
                    hooks.append(own[name])
    saved = []
    for of_one in hooks:
        saved.append((of_one, dict(of_one)))
        of_one.clear()
    try:
        yield
    finally:
        for of_one, before in reversed(saved):  # where one is there twice, the first has all
            of_one.clear()
            of_one.update(before)


@contextlib.contextmanager
def kept_aside(tensors: Sequence[torch.Tensor], scratch: Path | None) -> Iterator[None]:
    """Restore tensors on exit, from copies that take no device memory: on the host, or for host tensors in a file.

    Copies of device tensors also go to the file if host memory is short. The file is in ``scratch`` if the folder for
    temporary files has no room; if neither has, raise ConfigError. In a dry run nothing is copied: all values are zero.
    """
    if DRY_RUN in os.environ:
        yield
        return
    local = [*map(_local, tensors)]
    on_host = on_device = 0
    for tensor in local:
        if tensor.device.type == "cpu":
            on_host += tensor.nbytes
        else:
            on_device += tensor.nbytes
    # Training also needs host memory, for its data and for pinned copies.
    all_to_file = on_device > free_host_bytes() // 2
    in_file = on_host + (on_device if all_to_file else 0)
    folder = _folder_with_room(in_file, scratch)
    log.info(
        "weights and optimizer states are saved while probing: %s in a file in %s, %s in the host's memory",
        memory_size(in_file), folder, memory_size(on_device + on_host - in_file)
    )  # fmt: skip
    copies: list[torch.Tensor | None] = []  # None for those in the file
    file: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (closed below, where that may fail)
    try:
        with torch.no_grad():
            for tensor in local:
                to_file = all_to_file or tensor.device.type == "cpu"
                copies.append(None if to_file else tensor.to("cpu", copy=True))
                if to_file:
                    _write(file, tensor)
        file.flush()
    except OSError as error:  # another process has filled the disk in the meantime
        with contextlib.suppress(OSError):
            file.close()
        raise ConfigError(
            f"the probe cannot save weights and optimizer states in {folder} ({error}); set the environment variable "
            f"TMPDIR to a folder on a larger disk"
        ) from None
    try:
        yield
    finally:
        file.seek(0)
        with torch.no_grad(), file:
            for tensor, saved in zip(map(_local, tensors), copies, strict=True):
                tensor.copy_(_read_like(file, tensor) if saved is None else saved)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _write(file: IO[bytes], tensor: torch.Tensor) -> None:
    for part in _bytes_of(tensor.cpu().contiguous()):
        buffer = bytearray(part.numel())
        torch.frombuffer(buffer, dtype=torch.uint8).copy_(part)
        file.write(buffer)


def _read_like(file: IO[bytes], tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    for part in _bytes_of(copy):
        part.copy_(torch.frombuffer(bytearray(file.read(part.numel())), dtype=torch.uint8))
    return copy


def _bytes_of(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return views of the bytes of a contiguous tensor, none of them large, and no empty one."""
    flat = tensor.flatten()
    raw = flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # a single number may have any stride
    return torch.split(raw, _BYTES_AT_ONCE) if raw.numel() else []


def _folder_with_room(num_bytes: int, scratch: Path | None) -> Path:
    """Return the folder for temporary files, or ``scratch`` if that has no room for ``num_bytes`` per local rank."""
    num_bytes *= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    folders = [Path(tempfile.gettempdir())]
    if scratch is not None:  # or its nearest parent that exists
        folders.append(next(path for path in (scratch.absolute(), *scratch.absolute().parents) if path.is_dir()))
    for folder in folders:
        if _free_bytes(folder) > num_bytes:
            return folder
    tried = ", ".join(f"{folder} has {memory_size(_free_bytes(folder))} free" for folder in folders)
    raise ConfigError(
        f"the probe has to save {memory_size(num_bytes)} of weights and optimizer states, but {tried}; set the "
        f"environment variable TMPDIR to a folder on a larger disk"
    )


def _free_bytes(folder: Path) -> int:
    """Return the bytes that a file in ``folder`` can take; at most half of the free host memory on tmpfs and ramfs."""
    free = shutil.disk_usage(folder).free
    mounts = Path("/proc/mounts")
    innermost = of_folder = ""  # mount point that contains the folder, and its type
    for line in mounts.read_text().splitlines() if mounts.exists() else ():
        _, point, kind, *_ = line.split()
        if len(point) > len(innermost) and folder.resolve().is_relative_to(point):
            innermost, of_folder = point, kind
    return min(free, free_host_bytes() // 2) if of_folder in ("tmpfs", "ramfs") else free
