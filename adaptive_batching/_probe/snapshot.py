"""Save a model and its optimizers, and restore them bit for bit."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from adaptive_batching._host_memory import free_host_bytes
from adaptive_batching._trace.bits_and_bytes import make_paged_states, set_to_zero
from adaptive_batching._values import ConfigError

log = logging.getLogger(__name__)

_BYTES_AT_ONCE = 2**24


@contextlib.contextmanager
def unchanged(model: nn.Module, optimizers: Sequence[Optimizer], scratch: Path | None) -> Iterator[None]:
    """Restore what optimizers step, buffers, gradients, training mode and the whole optimizers on exit, bit for bit.

    States of paged optimizers that are not there yet are made, and set to their first values on exit: see
    :func:`~adaptive_batching._trace.bits_and_bytes.make_paged_states`. They are not saved.
    """
    parameters = [p for p in _in_groups(optimizers) if p.requires_grad]  # nothing else changes, in a frozen model
    gradients = [(p, p.grad) for p in parameters_of(model, optimizers)]
    paged = make_paged_states(optimizers)
    modes = [(module, module.training) for module in model.modules()]
    states = [{p: dict(state) for p, state in optimizer.state.items()} for optimizer in optimizers]
    groups = [
        [{k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        for optimizer in optimizers
    ]
    zero = {id(tensor) for tensor in paged}
    in_states = [v for state in states for entry in state.values() for v in entry.values() if id(v) not in zero]
    tensors = [*parameters, *model.buffers(), *(v for v in in_states if isinstance(v, torch.Tensor))]
    with kept_aside(tensors, scratch):
        try:
            yield
        finally:
            set_to_zero(paged)
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for module, training in modes:
                module.training = training
            for optimizer, state, saved_groups in zip(optimizers, states, groups, strict=True):
                optimizer.state.clear()
                optimizer.state.update(state)
                for group, saved in zip(optimizer.param_groups, saved_groups, strict=True):
                    for key in group.keys() - saved.keys() - {"params"}:
                        del group[key]
                    group.update(saved)


def parameters_of(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[nn.Parameter]:
    """Return the parameters of ``model``, and those that ``optimizers`` have from elsewhere, such as a loss's own."""
    return list({id(p): p for p in (*model.parameters(), *_in_groups(optimizers))}.values())


def _in_groups(optimizers: Sequence[Optimizer]) -> list[nn.Parameter]:
    found = (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
    return list({id(p): p for p in found}.values())


@contextlib.contextmanager
def kept_aside(tensors: Sequence[torch.Tensor], scratch: Path | None) -> Iterator[None]:
    """Restore tensors on exit, from copies that take no device memory: on the host, or for host tensors in a file.

    Copies of device tensors also go to the file if host memory is short. The file is in ``scratch`` if the folder for
    temporary files has no room; if neither has, raise ConfigError.
    """
    local = [_local(tensor) for tensor in tensors]
    on_host = sum(tensor.nbytes for tensor in local if tensor.device.type == "cpu")
    on_device = sum(tensor.nbytes for tensor in local) - on_host
    # Training also needs host memory, for its data and for pinned copies.
    all_to_file = on_device > free_host_bytes() // 2
    in_file = on_host + (on_device if all_to_file else 0)
    folder = _folder_with_room(in_file, scratch)
    log.info(
        "weights and optimizer states are saved while probing: %s in a file in %s, %s in the host's memory",
        _gib(in_file), folder, _gib(on_device + on_host - in_file)
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
    raw = tensor.view(-1).view(torch.uint8)
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
    tried = ", ".join(f"{folder} has {_gib(_free_bytes(folder))} free" for folder in folders)
    raise ConfigError(
        f"the probe has to save {_gib(num_bytes)} of weights and optimizer states, but {tried}; set the environment "
        f"variable TMPDIR to a folder on a larger disk"
    )


def _free_bytes(folder: Path) -> int:
    """Return the bytes that a file in ``folder`` can take; at most half of the free host memory on tmpfs and ramfs."""
    free = shutil.disk_usage(folder).free
    mounts = Path("/proc/mounts")
    lines = [line.split() for line in mounts.read_text().splitlines()] if mounts.exists() else []
    # (mount point, type) of every mount that contains the folder
    kinds = [(point, kind) for _, point, kind, *_ in lines if folder.resolve().is_relative_to(point)]
    _, kind = max(kinds, key=lambda mount: len(mount[0]), default=("", ""))
    return min(free, free_host_bytes() // 2) if kind in ("tmpfs", "ramfs") else free


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
