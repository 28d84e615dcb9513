"""Gradients that each rank has gathered alone, as a model wrapped by DDP does in ``no_sync``, summed over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from adaptive_batching._memory.out_of_memory import is_out_of_memory
from adaptive_batching._ranks.agree import Ranks
from adaptive_batching._ranks.fsdp import CannotRecoverError
from adaptive_batching._values import ConfigError

_BYTES_AT_ONCE = 2**25  # of gradients that are summed in one collective


class GradientSum:
    """Sums the gradients of ``parameters`` over ranks, once all of them know that their forwards and backwards ran.

    A rank that ran out of memory among the collectives would leave the others waiting. So :meth:`prepare` allocates all
    that :meth:`run` needs, where running out of memory can still be told.
    """

    def __init__(self, ranks: Ranks, parameters: Callable[[], Sequence[nn.Parameter]]) -> None:
        self._ranks = ranks
        self._parameters = parameters
        self._has_gradient: list[bool] = []
        self._room = torch.empty(0)

    def prepare(self) -> None:
        """Allocate what the sum needs; to be called after the last backward, on every rank."""
        trained = self._trained()
        self._has_gradient = [parameter.grad is not None for parameter in trained]
        for parameter in trained:
            gradient = parameter.grad
            if gradient is None:  # unused on this rank, perhaps not on others
                parameter.grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
            elif gradient.layout != torch.strided:
                raise ConfigError("gradients of several ranks are summed as dense tensors; set sparse=False")
            else:
                parameter.grad = gradient.contiguous()
        sizes = [sum(part.nbytes for part in group) for group in _in_groups(trained) if len(group) > 1]
        self._room = torch.empty(max(sizes, default=0), dtype=torch.uint8, device=trained[0].device)
        if self._room.device.type == "cpu":
            torch.empty(3 * _BYTES_AT_ONCE)  # gloo copies what it reduces; without room it would fail in its own thread

    def run(self, scale: float = 1.0) -> None:
        """Replace each gradient by its sum over ranks times ``scale``; what no rank has used keeps none."""
        trained = self._trained()
        used = [any(on_ranks) for on_ranks in zip(*self._ranks.gather(self._has_gradient), strict=True)]
        for parameter, is_used in zip(trained, used, strict=True):
            if not is_used:
                parameter.grad = None
        try:
            for group in _in_groups(trained):
                self._sum(group, scale)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise CannotRecoverError(
                "memory ran out inside a collective that sums gradients: whether the other ranks got what they wait "
                "for is unknown, so the step cannot run again. Set a smaller batch size"
            ) from error
        self._room = torch.empty(0)

    def _sum(self, group: list[torch.Tensor], scale: float) -> None:
        if len(group) == 1:
            dist.all_reduce(group[0])
            group[0].mul_(scale)
            return
        flat = self._room[: sum(part.nbytes for part in group)].view(group[0].dtype)
        torch.cat(group, out=flat)
        dist.all_reduce(flat)
        flat.mul_(scale)
        for part, summed in zip(group, torch.split(flat, [part.numel() for part in group]), strict=True):
            part.copy_(summed)

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._parameters() if parameter.requires_grad]


def sums_over_ranks(values: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return the sum over ranks of each value, a scalar, with its own type and on ``device``."""
    together = torch.stack([value.to(device).double() for value in values])
    dist.all_reduce(together)
    return [summed.to(value.dtype) for summed, value in zip(together, values, strict=True)]


def copy_from_first(buffers: Sequence[torch.Tensor]) -> None:
    """Replace buffers by those of the first rank, as DDP does before a forward."""
    for buffer in buffers:
        dist.broadcast(buffer, src=0)


def _in_groups(parameters: Sequence[nn.Parameter]) -> list[list[torch.Tensor]]:
    """Return views of the gradients, flat and in groups of one type and some size; what is larger is cut."""
    groups: list[list[torch.Tensor]] = []
    num_bytes = 0
    for part in sorted(_flat_parts(parameters), key=lambda part: str(part.dtype)):
        if not groups or groups[-1][0].dtype != part.dtype or num_bytes + part.nbytes > _BYTES_AT_ONCE:
            groups.append([])
            num_bytes = 0
        groups[-1].append(part)
        num_bytes += part.nbytes
    return groups


def _flat_parts(parameters: Sequence[nn.Parameter]) -> Iterator[torch.Tensor]:
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.numel():
            yield from torch.split(parameter.grad.view(-1), _BYTES_AT_ONCE // parameter.grad.itemsize)
