"""FSDP2 support that lets a rank that ran out of memory finish the collectives that its peers wait for.

Under FSDP every forward and backward is a sequence of all-gathers and reduce-scatters. A rank that stops midway leaves
its peers waiting for the rest. So the sequence is recorded once, and a rank that stops issues the rest with empty
buffers. Its peers reach the end of their micro-batch, and all ranks can discard it and start again.

Issuing the rest must not run out of memory, too. On the CPU, buffers are held for it from the start: freed memory may
be fragmented there, and memory that is held but never written to takes none. On an accelerator, buffers come from the
memory that the aborted micro-batch has left to the allocator, which was more.

This requires a sequence that is always the same: each forward has to call each sharded unit equally often. This fails
for a model whose output layer is sharded on its own and called once per chunk of tokens, if samples are so short that
they fill fewer chunks. The recipes pad such batches.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from adaptive_batching._memory.out_of_memory import is_out_of_memory
from adaptive_batching._ranks.agree import ONLY_HERE
from adaptive_batching._values import AdaptiveBatchingError

log = logging.getLogger(__name__)

_AllGatherBase: Any = object
_ReduceScatterBase: Any = object
with contextlib.suppress(ImportError):  # a torch without custom collectives; see why_not_drained
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    _AllGatherBase = getattr(_fsdp_collectives, "DefaultAllGather", object)
    _ReduceScatterBase = getattr(_fsdp_collectives, "DefaultReduceScatter", object)


class CannotRecoverError(AdaptiveBatchingError, RuntimeError):
    """Raised if a rank runs out of memory and cannot finish what its peers wait for. The message lists remedies.

    It must not say "out of memory": such an error would itself count as one to recover from.
    """


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


def sharded_roots(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules in ``model`` that FSDP2 shards, which may be the model itself."""
    if isinstance(model, FSDPModule):
        return [model]
    return [root for child in model.children() for root in sharded_roots(child)]


def why_not_drained() -> str:
    """Return what this torch lacks to drain collectives, in words; empty if nothing.

    It needs collectives of one's own, and a reset after an iteration that was broken off.
    """
    needed = ("set_custom_all_gather", "set_custom_reduce_scatter", "reset_iter_state")
    if all(hasattr(FSDPModule, name) for name in needed) and _AllGatherBase is not object:
        return ""
    return f"torch {torch.__version__} cannot reset FSDP2 after an error (2.13 can)"


def divides_gradients(roots: Sequence[nn.Module]) -> bool:
    """Return True if gradients are divided by something else than the number of ranks."""
    units = [unit for root in roots if isinstance(root, FSDPModule) for unit in _units_of(root)]
    groups = [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]
    return any(group.gradient_divide_factor is not None for group in groups)


def end_forward(models: Sequence[nn.Module]) -> None:
    """Take back what a forward without a backward leaves of the sharded among ``models``.

    That is gathered parameters, and the order of the forward, by which the next backward would gather them ahead.
    """
    for model in models:
        if not isinstance(model, FSDPModule) or model._get_fsdp_state()._is_root is None:  # nothing has run yet
            continue
        if hasattr(model, "reset_iter_state"):
            model.reset_iter_state()
        else:
            for unit in _units_of(model):
                unit.reshard()


def _units_of(root: FSDPModule) -> list[FSDPModule]:
    assert isinstance(root, nn.Module)
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


@dataclass(frozen=True)
class _Collective:
    """A collective as it was issued; ``operation`` is None for an all-gather."""

    output_shape: tuple[int, ...]
    input_shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    group: Any
    operation: Any = None

    @classmethod
    def as_issued(cls, output: torch.Tensor, given: torch.Tensor, group: Any, operation: Any = None) -> _Collective:
        return cls(tuple(output.shape), tuple(given.shape), given.dtype, given.device, group, operation)

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Bytes of the output and of the input."""
        return math.prod(self.output_shape) * self.dtype.itemsize, math.prod(self.input_shape) * self.dtype.itemsize

    def issue(self, output_room: torch.Tensor, input_room: torch.Tensor) -> None:
        """Run the collective on the beginning of each byte buffer."""
        output_bytes, input_bytes = self.num_bytes
        output = output_room[:output_bytes].view(self.dtype).view(self.output_shape)
        given = input_room[:input_bytes].view(self.dtype).view(self.input_shape)
        if self.operation is None:
            _AllGatherBase()(output, given, self.group)
        else:
            _ReduceScatterBase()(output, given, self.group, self.operation)


class _Issued(list[_Collective]):
    """Collectives of a micro-batch, as far as it has run."""

    before = 0
    """Collectives that their group had issued before the first of these, if it counts them."""

    def num_others(self) -> int:
        """Return how many collectives their group has issued since the first of these that are not among them."""
        return max(_num_issued(self[0]) - self.before - len(self), 0) if self else 0


class _Room:
    """Memory in which collectives are issued."""

    def __init__(self, collectives: Sequence[_Collective]) -> None:
        self._device = collectives[0].device
        self._sizes = [max(sizes) for sizes in zip(*(c.num_bytes for c in collectives), strict=True)]
        self._spare: torch.Tensor | None = None
        self._buffers = self._make() if self._device.type == "cpu" else None
        self.restore()

    def _make(self) -> list[torch.Tensor]:
        return [torch.zeros(size, dtype=torch.uint8, device=self._device) for size in self._sizes]

    def take(self) -> list[torch.Tensor]:
        """Return byte buffers for outputs and for inputs; the inputs are zeros."""
        self._spare = None
        return self._buffers if self._buffers is not None else self._make()

    def restore(self) -> None:
        """Hold the memory that the next failure will need."""
        if self._buffers is not None and self._spare is None:
            with contextlib.suppress(RuntimeError):  # the buffers themselves still exist
                self._spare = _room_of_gloo(sum(self._sizes))


def _room_of_gloo(num_bytes: int) -> torch.Tensor:
    """Allocate what gloo may take for buffers of ``num_bytes``: it copies them, and reduces in a third copy."""
    return torch.empty(3 * num_bytes + 4 * 2**20, dtype=torch.uint8)


class MicroBatchCollectives:
    """Records the collectives of root FSDP modules in forward and backward, and issues the rest after a failure."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._roots = [model for model in models if isinstance(model, FSDPModule)]
        assert len(self._roots) == len(models), "a model is not sharded"
        self._units = [unit for root in self._roots for unit in _units_of(root)]
        self._sequence: list[_Collective] | None = None
        self._room: _Room | None = None
        self._varies = False
        self.num_others = 0
        """Number of collectives in the first forward and backward that are not FSDP's, which cannot be issued again."""

        self._issued = _Issued()
        for unit in self._units:
            unit.set_custom_all_gather(_AllGather(self._issued))
            unit.set_custom_reduce_scatter(_ReduceScatter(self._issued))

    def start(self) -> None:
        self._issued.clear()

    def finish(self) -> None:
        """End the recording after the backward, and compare it with the first one."""
        if self._sequence is None:
            self._sequence = list(self._issued)
            self.num_others = self._issued.num_others()
            if self._sequence and self._room is None:  # empty with a single rank, which has no peers
                self._room = _Room(self._sequence)
        elif self._sequence != self._issued and not self._varies:
            self._varies = True
            log.warning(
                "the collectives of forward and backward passes vary; from now on, a rank that runs out of memory ends "
                "the run",
                extra=ONLY_HERE,
            )

    def of_forwards(self) -> MicroBatchCollectives:
        """Return a record of what forwards without a backward issue, which is another sequence; still to be made."""
        forwards = copy.copy(self)
        forwards._sequence, forwards._varies = None, False
        return forwards

    @property
    def can_drain(self) -> bool:
        """True if the rest of the aborted micro-batch is known.

        Ranks that have finished the same micro-batches have issued the same collectives, so all of them know whether
        the sequence varies.
        """
        is_known = self._sequence is not None and self._issued == self._sequence[: len(self._issued)]
        return is_known and not self._varies

    def drain(self, num_micro_batches: int) -> None:
        """Issue the rest of the aborted micro-batch, and all of the ``num_micro_batches`` that will not run.

        Do not call this in an ``except`` block: the traceback keeps the micro-batch's tensors alive. On an accelerator,
        it runs out of memory itself if, for example, another process has taken what this one released.
        """
        assert self._sequence is not None and self.can_drain, "the rest of the micro-batch is not known"
        if self._room is None:
            return
        buffers = self._room.take()
        for collective in [*self._sequence[len(self._issued) :], *self._sequence * num_micro_batches]:
            collective.issue(*buffers)

    def reset(self) -> None:
        """Forget the iteration, on every rank, after one of them has drained it."""
        for root in self._roots:
            root.reset_iter_state()
        # This keeps gradients that were complete but not reduced yet, and the next backward would add to them.
        groups = [group for unit in self._units for group in unit._get_fsdp_state()._fsdp_param_groups]
        for parameter in (parameter for group in groups for parameter in group.fsdp_params):
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
        if self._room is not None:
            self._room.restore()


class _AllGather(_AllGatherBase):
    def __init__(self, issued: _Issued) -> None:
        self._issued = issued

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        return _issue(self._issued, super().__call__, (output_tensor, input_tensor, group), async_op)


class _ReduceScatter(_ReduceScatterBase):
    def __init__(self, issued: _Issued) -> None:
        self._issued = issued

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        return _issue(self._issued, super().__call__, (output_tensor, input_tensor, group, op), async_op)


def _issue(issued: _Issued, call: Callable[..., Any], arguments: tuple[Any, ...], async_op: bool) -> Any:
    """Issue a collective, and note it as ``issued`` before anything else can fail.

    On the host a call that is not asynchronous waits for the exchange, too: so it is made asynchronous, to be waited
    for here. An accelerator's returns when it has been issued.

    If memory runs out when the group has counted the collective, raise CannotRecoverError: whether the other ranks get
    what they wait for is not known then. Issued again, it might be one too many, and left out, one too few.
    """
    _check_room(*arguments[:2])
    collective = _Collective.as_issued(*arguments)
    waits = not async_op and collective.device.type == "cpu"
    before = _num_issued(collective)
    issued.before = issued.before if issued else before
    try:
        work = call(*arguments, async_op or waits)
        issued.append(collective)
        if not waits:
            return work
        work.wait()
    except Exception as error:
        if not is_out_of_memory(error) or _num_issued(collective) == before:
            raise
        raise CannotRecoverError(
            "memory ran out inside a collective: whether the other ranks got what they wait for is unknown, so the "
            "step cannot run again. Set a smaller batch_size or micro_batch_size"
        ) from error


def _check_room(output: torch.Tensor, given: torch.Tensor) -> None:
    """Run out of memory here, where recovery is possible, rather than in gloo's thread.

    A collective that fails in that thread has been issued on this rank, but not on its peers, which would wait forever.
    """
    if output.device.type == "cpu":
        _room_of_gloo(output.nbytes + given.nbytes)


def _num_issued(collective: _Collective) -> int:
    """Return how many collectives the group has issued on this rank; 0 if it does not count them."""
    try:
        return int(collective.group._get_backend(collective.device)._get_sequence_number_for_group())
    except RuntimeError:  # of a backend other than gloo and NCCL
        return 0
