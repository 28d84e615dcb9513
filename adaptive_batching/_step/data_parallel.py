"""Ranks that train one model together, each with a copy (DDP) or a shard of it (FSDP2), alike to an optimizer step.

Copies communicate only when all ranks know that their forwards and backwards have run. What shards communicate is
learned before, so that a rank that fails can issue what the others wait for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from adaptive_batching._device import unchanged_random_state
from adaptive_batching._memory.out_of_memory import is_out_of_memory
from adaptive_batching._probe.does_not_fit import DoesNotFitError
from adaptive_batching._ranks.agree import ALONE, Ranks
from adaptive_batching._ranks.fsdp import (
    MicroBatchCollectives,
    divides_gradients,
    sharded_roots,
    why_not_drained,
)
from adaptive_batching._ranks.gradient_sum import GradientSum, copy_from_first
from adaptive_batching._values import ConfigError

T = TypeVar("T")


class DataParallel:
    """Ranks that train one model together, and how what they compute becomes that of all.

    Args:
        ranks: That train together.
        parameters: Returns all that have gradients.
        roots: What FSDP2 shards, from the outside; none if every rank has a copy of the model.
        copy: The copy as DDP wraps it; None if the model is called without DDP.
        collectives: Of the shards, if they are known already.
        why_alone: Why a rank of a sharded model cannot tell the others that it ran out of memory, in words.
    """

    def __init__(
        self,
        ranks: Ranks,
        parameters: Callable[[], Sequence[nn.Parameter]],
        roots: Sequence[nn.Module] = (),
        copy: DistributedDataParallel | None = None,
        collectives: MicroBatchCollectives | None = None,
        why_alone: str = "",
    ) -> None:
        self.ranks = ranks
        self.roots = list(roots)
        self.collectives = collectives
        # A rank of shards can tell the others only if it is known what they wait for.
        self.agreeing = ranks if ranks.size == 1 or not self.roots or collectives is not None else ALONE
        """Ranks that learn of an out-of-memory error here: all, or this one alone if the others cannot be told."""

        self.why_alone = why_alone
        self._parameters = parameters
        self._copy = copy
        self._sum = GradientSum(ranks, parameters) if ranks.size > 1 and not roots else None

    @property
    def agrees(self) -> bool:
        """True if all ranks learn of an out-of-memory error on one of them, or if there is only one."""
        return self.agreeing is self.ranks

    def check_size(self) -> None:
        """Raise ConfigError if processes have joined since this was made: each would train a model of its own."""
        if (size := _num_processes()) != self.ranks.size:
            raise ConfigError(
                f"{size} processes train together, and when AdaptiveStep was made it was {self.ranks.size}; make it "
                "after init_process_group, with the model that DistributedDataParallel or fully_shard returns"
            )

    @property
    def is_recorded(self) -> bool:
        """True if it is known what shards communicate, or if there are none."""
        return not self.roots or self.collectives is not None

    def record(self, forward_backward: Callable[[], object], device: torch.device) -> None:
        """Learn which collectives shards need, as :func:`record_collectives` does; only the first call runs anything.

        Raises:
            ConfigError: If there are other collectives than FSDP's.
        """
        if self.is_recorded:
            return
        collectives = MicroBatchCollectives(self.roots)
        record_collectives(collectives, forward_backward, self._parameters(), device)
        if collectives.num_others:
            raise ConfigError(
                f"a forward and backward pass has {collectives.num_others} collectives that are not FSDP's, for which "
                "ranks would wait if one ran out of memory; leave out of the loss what gathers or sums over ranks"
            )
        self.collectives, self.agreeing = collectives, self.ranks

    def prepare_sum(self) -> None:
        """Allocate what the sum of gradients needs, after the last backward, where memory may still run out."""
        if self._sum is not None:
            self._sum.prepare()

    @contextlib.contextmanager
    def without_sync(self) -> Iterator[None]:
        """Keep DDP from communicating in forward and backward."""
        if self._copy is None:
            yield
            return
        broadcasts, self._copy.require_forward_param_sync = self._copy.require_forward_param_sync, False
        try:
            with self._copy.no_sync():
                yield
        finally:
            self._copy.require_forward_param_sync = broadcasts

    def sum_gradients(self, scale: float = 1.0) -> None:
        """Make each gradient its sum over ranks times ``scale``, after all parts; buffers are those of the first."""
        if self._sum is not None:
            self._sum.run(scale)
            if self._copy is not None and self._copy.broadcast_buffers:
                copy_from_first(self._copy.modules_buffers)
            return
        factor = scale * (self.ranks.size if self.roots else 1)  # FSDP2 has taken the mean
        for parameter in self._parameters() if factor != 1 else ():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def record_collectives(
    collectives: MicroBatchCollectives,
    run: Callable[[], object],
    parameters: Sequence[nn.Parameter],
    device: torch.device,
    less_memory: str = "checkpointing of activations",
) -> None:
    """Learn what shards communicate, from a run of a few tokens that leaves nothing behind; all ranks call it.

    Raises:
        DoesNotFitError: If memory runs out; ``less_memory`` is what to do, besides more devices.
    """
    failure: Exception | None = None
    try:
        with unchanged_random_state(device), torch.compiler.set_stance("force_eager"):
            collectives.start()
            run()
            collectives.finish()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        failure = error
    for parameter in parameters:
        parameter.grad = None
    if failure is not None:
        raise DoesNotFitError.even_of_few(f"more devices, or {less_memory}") from failure


def data_parallel_of(model: nn.Module, parameters: Callable[[], Sequence[nn.Parameter]]) -> DataParallel:
    """Return how the processes of the default group, if there is one, train ``model``.

    Raises:
        ConfigError: If they do so in a way in which one that runs out of memory would leave others waiting, or in which
            the gradients of a step are not a sum over ranks.
    """
    size = _num_processes()
    copies = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    roots = sharded_roots(model)
    copy = copies[0] if copies else None
    if size == 1 and not roots:
        return DataParallel(ALONE, parameters, copy=copy)
    why = _why_not_sharded(roots, parameters(), size) if roots else _why_no_copies(model, copies, parameters(), size)
    if not why and any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        why = "SyncBatchNorm communicates within a forward pass, which may run out of memory; leave it out"
    if why:
        raise ConfigError(why)
    return DataParallel(Ranks(parameters()[0].device), parameters, roots, copy)


def _num_processes() -> int:
    """Return how many processes the default group has by now; 1 without a group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _why_not_sharded(roots: Sequence[nn.Module], parameters: Sequence[nn.Parameter], size: int) -> str:
    if why := why_not_drained():
        return why
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    apart = [parameter for parameter in trained if not isinstance(parameter, DTensor)]
    if apart:
        return f"{len(apart)} parameters are not sharded; call fully_shard on the model itself, after its layers"
    meshes = {parameter.device_mesh for parameter in trained if isinstance(parameter, DTensor)}
    if any(mesh.ndim > 1 or mesh.size() != size for mesh in meshes):
        return f"AdaptiveStep trains with FSDP2 over all {size} processes, without HSDP or tensor parallelism"
    if divides_gradients(roots):
        return "set_gradient_divide_factor scales gradients that AdaptiveStep scales itself; leave it out"
    if any(parameter.device.type != mesh.device_type for parameter in trained for mesh in meshes):
        return "AdaptiveStep trains with FSDP2 without CPUOffloadPolicy"
    return ""


def _why_no_copies(
    model: nn.Module, copies: Sequence[DistributedDataParallel], parameters: Sequence[nn.Parameter], size: int
) -> str:
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return "FullyShardedDataParallel (FSDP1) leaves ranks waiting for one that runs out of memory; use fully_shard"
    if len(copies) != 1 or any(isinstance(parameter, DTensor) for parameter in parameters):
        return (
            f"{size} processes train together; wrap the model in DistributedDataParallel, or shard it by fully_shard "
            "(FSDP2), before AdaptiveStep gets it: other ways of training together do not work"
        )
    [copy] = copies
    if dist.get_world_size(copy.process_group) != size:
        return f"DistributedDataParallel has a process_group of its own; AdaptiveStep trains with all {size} processes"
    if copy.static_graph:
        return "DistributedDataParallel communicates by itself with static_graph=True; leave static_graph out"
    return ""
