"""Ranks that train one model together, each with a copy (DDP) or a shard of it (FSDP2), alike to an optimizer step.

No rank waits in vain for one that has run out of memory, or failed: copies communicate only when all ranks know that
their forwards and backwards have run, and for shards the failing rank issues what the others wait for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from adaptive_batching._device import unchanged_random_state
from adaptive_batching._out_of_memory import is_out_of_memory
from adaptive_batching._probe.does_not_fit import DoesNotFitError
from adaptive_batching._ranks.agree import ALONE, Ranks
from adaptive_batching._ranks.fsdp import (
    CannotRecoverError,
    MicroBatchCollectives,
    can_drain,
    divides_gradients,
    end_forward,
    sharded_roots,
)
from adaptive_batching._ranks.gradient_sum import GradientSum, copy_from_first, sums_over_ranks
from adaptive_batching._step.run import Outcome, run_micro_batches
from adaptive_batching._values import ConfigError

T = TypeVar("T")


class DataParallel:
    """Runs the parts of a step on every rank, and makes their gradients those of all ranks.

    Args:
        ranks: That train together.
        parameters: Returns all that have gradients.
        roots: What FSDP2 shards, from the outside; none if every rank has a copy of the model.
        copy: The copy as DDP wraps it; None if the model is called without DDP.
    """

    def __init__(
        self,
        ranks: Ranks,
        parameters: Callable[[], Sequence[nn.Parameter]],
        roots: Sequence[nn.Module] = (),
        copy: DistributedDataParallel | None = None,
    ) -> None:
        self.ranks = ranks
        self._parameters = parameters
        self._roots = list(roots)
        self._copy = copy
        self._collectives: MicroBatchCollectives | None = None
        self._sum = GradientSum(ranks, parameters) if ranks.size > 1 and not roots else None

    @property
    def fills_up(self) -> bool:
        """True if a rank may have to run parts without weight; see :meth:`num_fillers`."""
        return self.ranks.size > 1

    def without_ddp(self, model: nn.Module) -> nn.Module:
        """Return what DDP wraps, if it is in ``model``, as DDP cannot be copied for a trace."""
        return model if self._copy is None else self._copy.module

    def record(self, forward_backward: Callable[[], object], device: torch.device) -> None:
        """Learn which collectives shards need, from a forward and backward of a few tokens that leaves nothing behind.

        All ranks call it before they run parts. Only the first call runs anything.
        """
        if not self._roots or self._collectives is not None:
            return
        collectives = MicroBatchCollectives(self._roots)
        failure: Exception | None = None
        try:
            with unchanged_random_state(device), torch.compiler.set_stance("force_eager"):
                collectives.start()
                forward_backward()
                collectives.finish()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = error
        for parameter in self._parameters():
            parameter.grad = None
        if failure is not None:
            raise DoesNotFitError(
                "out of memory in the first forward and backward, of a few tokens; nothing larger will fit. Use more "
                "devices, or checkpoint activations"
            ) from failure
        if collectives.num_others:
            raise ConfigError(
                f"a forward and backward have {collectives.num_others} collectives that are not FSDP's, for which ranks"
                " would wait if one ran out of memory; leave out of the loss what gathers or sums over ranks"
            )
        self._collectives = collectives

    def num_fillers(self, num_parts: int) -> int:
        """Return how many parts without weight follow those of this rank, so that all ranks run as many as shards need.

        A rank without samples runs one.
        """
        wanted = int(self.ranks.largest(num_parts)) if self._roots else 1
        return max(wanted - num_parts, 0)

    def run(
        self,
        parts: Sequence[Callable[[], T]],
        discard: Callable[[], None],
        count_retries: Callable[[], int] = lambda: 0,
    ) -> Outcome[T]:
        """Run forward and backward of each part, up to the first that runs out of memory on some rank.

        Arguments are those of :func:`run_micro_batches`.

        Raises:
            Exception: Any other error of a part; an :class:`OtherRankError` repeats it on all other ranks.
        """
        if self.ranks.size == 1 and not self._roots:
            with self.without_sync():
                return run_micro_batches(parts, ALONE, None, discard, count_retries)
        end_forward(self._roots)  # of an evaluation, which leaves parameters gathered
        broken: list[Exception] = []
        runs = [partial(_noting, part, broken) for part in parts]
        if self._sum is not None:
            runs[-1] = partial(_and_then, runs[-1], self._sum.prepare, broken)
        try:
            with self.without_sync():
                ranks = self.ranks if self._roots else ALONE
                outcome = run_micro_batches(runs, ranks, self._collectives, discard, count_retries)
            if not self._roots:
                outcome = self._agreed(outcome, discard)
            if outcome.failed:
                self.ranks.all_results(partial(_raise_first, broken))
        except Exception:
            if broken:  # whatever has happened while the others were told
                raise broken[0] from None
            raise
        return outcome

    def _agreed(self, outcome: Outcome[T], discard: Callable[[], None]) -> Outcome[T]:
        """Return the outcome with what happened on any rank."""
        worst = self.ranks.largest(2 if outcome.failed else 1 if outcome.retried else 0)
        if worst == 2 and not outcome.failed:
            discard()
        return replace(outcome, failed=worst == 2, retried=worst == 1)

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

    def total(self, loss: torch.Tensor, number: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sums of both, scalars, over ranks."""
        if self.ranks.size == 1:
            return loss, number
        loss, number = sums_over_ranks([loss, number], loss.device)
        return loss, number

    def sum_gradients(self, scale: float = 1.0) -> None:
        """Make each gradient its sum over ranks times ``scale``, after :meth:`run`; buffers are those of the first."""
        if self._sum is not None:
            self._sum.run(scale)
            if self._copy is not None and self._copy.broadcast_buffers:
                copy_from_first(self._copy.modules_buffers)
            return
        factor = scale * (self.ranks.size if self._roots else 1)  # FSDP2 has taken the mean
        for parameter in self._parameters() if factor != 1 else ():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def data_parallel_of(model: nn.Module, parameters: Callable[[], Sequence[nn.Parameter]]) -> DataParallel:
    """Return how the processes of the default group, if there is one, train ``model``.

    Raises:
        ConfigError: If they do so in a way in which one that runs out of memory would leave others waiting, or in which
            the gradients of a step are not a sum over ranks.
    """
    size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    copies = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    roots = sharded_roots(model)
    copy = copies[0] if copies else None
    if size == 1 and not roots:
        return DataParallel(ALONE, parameters, copy=copy)
    why = _why_not_sharded(roots, parameters(), size) if roots else _why_no_copies(model, copies, parameters(), size)
    if not why and any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        why = "SyncBatchNorm communicates within a forward, which may run out of memory; leave it out"
    if why:
        raise ConfigError(why)
    return DataParallel(Ranks(parameters()[0].device), parameters, roots, copy)


def _why_not_sharded(roots: Sequence[nn.Module], parameters: Sequence[nn.Parameter], size: int) -> str:
    if not can_drain():
        return f"AdaptiveStep trains with FSDP2 from torch 2.13 on, and this is {torch.__version__}"
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


def _noting(part: Callable[[], T], broken: list[Exception]) -> T:
    """Run a part; let an error that is not for lack of memory pass for one, so that the other ranks are told."""
    try:
        return part()
    except Exception as error:
        if is_out_of_memory(error) or isinstance(error, CannotRecoverError):
            raise
        broken.append(error)
    raise MemoryError("stands for an error that is raised when all ranks know of it")


def _and_then(part: Callable[[], T], prepare: Callable[[], None], broken: list[Exception]) -> T:
    result = part()
    _noting(prepare, broken)
    return result


def _raise_first(errors: Sequence[Exception]) -> None:
    if errors:
        raise errors[0]
