"""Record what a training step takes and gives back: every allocation, its kind, and the moment of the step.

On CUDA, operations take memory besides their results: for the time of a call, and for good by handles of cuBLAS.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._tools.common_utils import get_untyped_storages  # looks inside NF4 and DTensor
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter

from adaptive_batching._caching_allocator import workspace_bytes
from adaptive_batching._step_time.operations import ON_CPU, expected_launches, flops_of, operation, tensors_of
from adaptive_batching._step_time.step_work import Operation
from adaptive_batching._trace.traced_step import (
    ACTIVATIONS,
    BACKWARD,
    BETWEEN,
    FORWARD,
    GRADIENTS,
    LOGITS,
    LOSS,
    OPTIMIZER,
    OTHER,
    Scratch,
    StepRecord,
    StorageTracker,
)  # fmt: skip

_aten = torch.ops.aten
# Operations that need a handle of cuBLAS.
_MATRIX_PRODUCTS = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default)
_FLASH_BACKWARD = _aten._scaled_dot_product_flash_attention_backward
_THREADS = 132 * 2048  # of an H100 at once, where the device is not known; most others have fewer
_WRAPPERS = ("torch/_compile.py", "torch/_dynamo/eval_frame.py")  # of a dispatch mode, which they keep Dynamo out of


class _Handle:
    """The workspace of a library's handle, as a storage."""

    @property
    def _cdata(self) -> int:
        return -id(self)  # storages have positive ones


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every storage that operations make under it, until it dies.

    Logits are known by a last dimension that is in ``vocabulary``. Only memory on ``device_type`` counts, with
    ``on_cuda`` also what kernels of CUDA take for the time of a call.
    """

    fused = False  # while an operation runs whose result a compiler would never store
    in_place_of: torch.Tensor | None = None  # over which the running operation writes its result
    stream = 0  # on which is allocated now; 0 for the main one
    label: str | None = None  # kind of what is allocated now; None for what the moment and the shape say

    def __init__(
        self,
        vocabulary: Iterable[int] = (),
        device_type: str = "cpu",
        *,
        on_cuda: bool = False,
        notes_work: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._vocabulary, self._device_type, self._on_cuda = frozenset(vocabulary), device_type, on_cuda
        self._tracker = StorageTracker()
        # Of cuBLAS: one of the thread that runs forwards, and one of autograd's.
        self._handles = [_Handle(), _Handle()] if on_cuda else []
        for handle in self._handles:
            self._tracker.allocate(handle, OTHER, workspace_bytes())
        self._equality: weakref.ref[Any] | None = None  # last result of a comparison of two numbers
        self._in_optimizer = False
        self._depth = 0  # of modules whose forward runs
        self._notes_work = notes_work
        self.begin()

    def begin(self, *, kept_bytes: int = 0) -> None:
        """Start the record of a step. What is alive now rests between steps; one before made ``kept_bytes`` of it."""
        self._tracker.begin()
        self._kept_bytes = kept_bytes
        self._flops = self._recomputed_flops = self._attention_flops = 0
        self._moment = BETWEEN
        self._work: list[Operation] = []

    @property
    def current_bytes(self) -> int:
        return self._tracker.current_bytes

    def record(self) -> StepRecord:
        flops = dict(flops=self._flops, recomputed_flops=self._recomputed_flops, attention_flops=self._attention_flops)
        return self._tracker.record(kept_bytes=self._kept_bytes, work=self._work, **flops)

    def hold(self, tensors: Iterable[torch.Tensor], kind: str, *, counts: bool = True) -> None:
        """Record storages, or change their kind if known; those that do not count take no memory."""
        for tensor in tensors:
            for storage in _storages(tensor):
                size = storage.nbytes() if counts and self._is_here(tensor) else 0
                self._tracker.hold(storage, kind, size)

    @contextlib.contextmanager
    def watching(
        self, models: Sequence[nn.Module], parameters: Sequence[nn.Parameter], *, steps_elsewhere: bool = False
    ) -> Iterator[None]:
        """Tell forward, loss, backward and optimizer step apart, and gradients from what else a backward makes.

        The optimizers step ``parameters``; ``steps_elsewhere`` is on another device, whose memory does not count.
        """

        def set_moment(moment: str) -> None:
            self._moment = moment

        def before_optimizer(optimizer: Optimizer, *_: Any) -> None:
            self._in_optimizer = True
            for tensor in state_tensors([optimizer]):
                for storage in _storages(tensor):
                    self._tracker.note_need(storage, Recorder.stream)
            Recorder.fused = steps_elsewhere
            for parameter in parameters:
                hold_gradient(parameter)

        def after_optimizer(*_: Any) -> None:
            self._in_optimizer = Recorder.fused = False

        def hold_gradient(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                self.hold([parameter.grad], GRADIENTS)

        def note_depth(change: int) -> None:
            self._depth += change

        handles: list[Any] = [
            register_module_forward_pre_hook(lambda *_: note_depth(1)),
            register_module_forward_hook(lambda *_: note_depth(-1), always_call=True),
            register_optimizer_step_pre_hook(before_optimizer),
            register_optimizer_step_post_hook(after_optimizer),
        ]
        for model in models:
            handles.append(model.register_forward_pre_hook(lambda *_: set_moment(FORWARD), prepend=True))
            handles.append(model.register_forward_hook(lambda *_: set_moment(LOSS)))
            trained: list[Any] = [parameter for parameter in model.parameters() if parameter.requires_grad]
            handles += [parameter.register_post_accumulate_grad_hook(hold_gradient) for parameter in trained]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _aten._local_scalar_dense.default:
            # An optimizer reads its step count, but a fake tensor has no value. If memory depends on one, the verifying
            # step will show it. None equals another: there are targets, and losses are not 0.
            if args[0].dtype == torch.bool:
                return self._equality is None or self._equality() is not args[0]
            return 1
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked for more often than anything is computed
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back as what this device computes, and its collectives
        if func is _aten.index.Tensor:
            args = (args[0], _without_masks(args[1]))
        kwargs = kwargs or {}
        self._tracker.last_sum = None  # what has not ended by now lives on
        out = func(*args, **kwargs)
        if func in (_aten.eq.Scalar, _aten.eq.Tensor) and out.dim() == 0:
            self._equality = weakref.ref(out)
        in_backward = torch._C._current_graph_task_id() != -1
        recomputes = in_backward and self._depth > 0
        if in_backward:
            self._moment = BACKWARD
        elif self._moment == BACKWARD:
            self._moment = OPTIMIZER  # clipping and scaling of the gradient included
        moment = OPTIMIZER if self._in_optimizer else self._moment
        self._note_results(out, moment, recomputes)
        if self._handles and func in _MATRIX_PRODUCTS and not Recorder.fused:
            self._tracker.note_need(self._handles[in_backward], Recorder.stream)
        packet = getattr(func, "_overloadpacket", None)
        if (flops := flops_of(func, args, kwargs, out)) is not None:
            # Layers are products; batches of them, attention written out.
            self._flops += flops
            self._recomputed_flops += flops if recomputes else 0
            if not recomputes and (packet is _aten.bmm or "scaled_dot_product" in str(packet)):
                self._attention_flops += flops
        if self._notes_work and not Recorder.fused:
            self._note_work(func, args, kwargs, out)
        scratch = scratch_of(func, args) if self._on_cuda and not Recorder.fused else None
        self._tracker.end_operation(moment, scratch)
        if in_backward and func is _aten.add.Tensor and _called_by_autograd(sys._getframe(1)):
            self._note_sum(args, out)
        return out

    def _note_work(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        read, written = (tensors_of(values, self._device_type) for values in ((args, kwargs), out))
        if launches := expected_launches(func, read or written):
            self._work.append(operation(func, args, kwargs, out, read, written, launches, ""))

    def _note_results(self, out: Any, moment: str, recomputes: bool) -> None:
        for value in tree_iter(out):
            if isinstance(value, torch.Tensor):
                for storage in _storages(value):
                    if not self._tracker.knows(storage):
                        size = storage.nbytes() if not Recorder.fused and self._is_here(value) else 0
                        self._tracker.allocate(storage, self._kind_of(value, moment, recomputes), size, Recorder.stream)
        if Recorder.in_place_of is not None and isinstance(out, torch.Tensor):
            self._tracker.write_over(_storages(Recorder.in_place_of)[0], _storages(out)[0])

    def _kind_of(self, tensor: torch.Tensor, moment: str, recomputes: bool) -> str:
        if Recorder.label is not None:
            return Recorder.label
        if tensor.is_floating_point() and tensor.dim() > 1 and tensor.shape[-1] in self._vocabulary:
            return OTHER if moment == OPTIMIZER else LOGITS
        return ACTIVATIONS if moment in (FORWARD, LOSS) or recomputes else OTHER

    def _note_sum(self, args: Any, out: torch.Tensor) -> None:
        """Remember a sum of two gradients until it is known whether the first of them dies."""
        if Recorder.fused or not isinstance(args[0], torch.Tensor) or type(out) is not type(args[0]):
            return
        if args[0]._is_view():
            return  # its base holds the storage as well: the first gradient of a matrix is a view, and is not added to
        [term], [result] = _storages(args[0]), _storages(out)
        self._tracker.note_sum(term, result)

    def _is_here(self, tensor: torch.Tensor) -> bool:
        """True if a tensor's memory counts: that of those inside it, as it may name another device."""
        while is_traceable_wrapper_subclass(tensor):
            tensor = getattr(tensor, tensor.__tensor_flatten__()[0][0])
        return tensor.device.type == self._device_type


def labelled(kind: str) -> contextlib.AbstractContextManager[Any]:
    return mock.patch.object(Recorder, "label", kind)


def on_stream(number: int) -> contextlib.AbstractContextManager[Any]:
    return mock.patch.object(Recorder, "stream", number)


def state_tensors(optimizers: Sequence[Optimizer]) -> list[torch.Tensor]:
    values = [value for o in optimizers for state in o.state.values() for value in state.values()]
    return [value for value in values if isinstance(value, torch.Tensor)]


def _without_masks(indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Return indices in which a mask, whose values a trace does not have, selects all that there is."""
    positions: list[torch.Tensor | None] = []
    for index in indices:
        is_mask = index is not None and index.dtype == torch.bool
        positions += [index] if index is None or not is_mask else [_positions(index)] * index.dim()
    return positions


def _positions(mask: torch.Tensor) -> torch.Tensor:
    return mask.new_empty(mask.numel(), dtype=torch.long)


def _called_by_autograd(frame: Any) -> bool:
    """True if ``frame``, wrappers aside, is autograd's call of its engine, with no Python in between.

    On a device other than the CPU the engine runs in a thread of its own, in which nothing has called it.
    """
    while frame is not None and frame.f_code.co_filename.endswith(_WRAPPERS):
        frame = frame.f_back
    return frame is None or frame.f_code.co_name == "_engine_run_backward"


def _storages(tensor: torch.Tensor) -> list[Any]:
    """Return the storages of a tensor and of those inside it, in the same order in each trace."""
    return sorted(get_untyped_storages(tensor), key=lambda storage: storage.nbytes())


def scratch_of(func: Any, args: Sequence[Any]) -> Scratch | None:
    """Return what an operation takes while it runs."""
    if func is _aten.embedding_dense_backward.default:
        gradient, indices = args[0], args[1]
        return Scratch("embedding", (indices.numel(), int(args[2]), gradient.shape[-1]))
    packet = getattr(func, "_overloadpacket", None)
    if ON_CPU.get(packet, packet) is _FLASH_BACKWARD:
        *batch, length, width = args[1].shape
        return Scratch("attention", (prod(batch), length, width))
    if func is _aten.sum.dim_IntList and args[0].is_contiguous():
        shape, dims = args[0].shape, sorted(dim % max(args[0].dim(), 1) for dim in args[1] or ())
        if dims and dims == list(range(len(dims))) and len(dims) < len(shape):
            inputs, outputs = prod(shape[: len(dims)]), prod(shape[len(dims) :])
            return Scratch("sum of rows", (inputs, outputs, _threads_at_once()))
    return None


def _threads_at_once() -> int:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return _THREADS
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return int(properties.multi_processor_count * properties.max_threads_per_multi_processor)
