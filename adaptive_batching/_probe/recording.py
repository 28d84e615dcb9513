"""Record what a training step takes and gives back: every allocation, its kind, and the moment of the step."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

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

from adaptive_batching._probe.flops import flops_of, is_attention
from adaptive_batching._probe.kernels import MATRIX_PRODUCTS, handle_bytes, scratch_of
from adaptive_batching._probe.ledger import (
    ACTIVATIONS,
    BACKWARD,
    BETWEEN,
    FORWARD,
    GRADIENTS,
    LOGITS,
    LOSS,
    OPTIMIZER,
    OTHER,
    Ledger,
    StepRecord,
)

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

    fused = False
    """True while an operation runs whose result a compiler would never store."""

    in_place_of: torch.Tensor | None = None
    """The tensor over which the running operation writes its result, if there is one."""

    stream = 0
    """Number of the stream on which is allocated now; 0 for the main one."""

    label: str | None = None
    """Kind of what is allocated now; None for what the moment and the shape say."""

    def __init__(self, vocabulary: Iterable[int] = (), device_type: str = "cpu", *, on_cuda: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._vocabulary = frozenset(vocabulary)
        self._device_type = device_type
        self._on_cuda = on_cuda
        self._ledger = Ledger()
        self._handles = [_Handle(), _Handle()] if on_cuda else []
        """Of cuBLAS: one of the thread that runs forwards, and one of autograd's."""

        for handle in self._handles:
            self._ledger.allocate(handle, OTHER, handle_bytes())
        self._equality: weakref.ref[Any] | None = None
        """Last result of a comparison of two numbers for equality."""

        self._in_optimizer = False
        self._depth = 0  # of modules whose forward runs
        self.begin()

    def begin(self, *, kept_bytes: int = 0) -> None:
        """Start the record of a step. What is alive now rests between steps; one before made ``kept_bytes`` of it."""
        self._ledger.begin()
        self._kept_bytes = kept_bytes
        self._flops = self._recomputed_flops = self._attention_flops = 0
        self._moment = BETWEEN

    @property
    def current_bytes(self) -> int:
        return self._ledger.current_bytes

    def record(self) -> StepRecord:
        return self._ledger.record(
            kept_bytes=self._kept_bytes, flops=self._flops, recomputed_flops=self._recomputed_flops,
            attention_flops=self._attention_flops,
        )  # fmt: skip

    def hold(self, tensor: torch.Tensor, kind: str, *, counts: bool = True) -> None:
        """Record a tensor's storages, or change their kind if known; those that do not count take no memory."""
        counts = counts and _device_type(tensor) == self._device_type
        for storage in _storages(tensor):
            if self._ledger.knows(storage):
                self._ledger.call_it(storage, kind)
            else:
                self._ledger.allocate(storage, kind, storage.nbytes() if counts else 0)

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
                    if self._ledger.knows(storage):
                        self._ledger.note_need(storage, Recorder.stream)
            Recorder.fused = steps_elsewhere
            for parameter in parameters:
                if parameter.grad is not None:
                    self.hold(parameter.grad, GRADIENTS)

        def after_optimizer(*_: Any) -> None:
            self._in_optimizer = False
            Recorder.fused = False

        def after_gradient(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                self.hold(parameter.grad, GRADIENTS)

        def enter_forward(*_: Any) -> None:
            self._depth += 1

        def leave_forward(*_: Any) -> None:
            self._depth -= 1

        handles: list[Any] = [
            register_module_forward_pre_hook(enter_forward),
            register_module_forward_hook(leave_forward, always_call=True),
            register_optimizer_step_pre_hook(before_optimizer),
            register_optimizer_step_post_hook(after_optimizer),
        ]
        for model in models:
            handles.append(model.register_forward_pre_hook(lambda *_: set_moment(FORWARD), prepend=True))
            handles.append(model.register_forward_hook(lambda *_: set_moment(LOSS)))
            for parameter in model.parameters():
                if parameter.requires_grad:
                    handles.append(parameter.register_post_accumulate_grad_hook(after_gradient))  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note_sum(self, args: Any, out: torch.Tensor) -> None:
        """Remember a sum of two gradients until it is known whether the first of them dies."""
        if Recorder.fused or not isinstance(args[0], torch.Tensor) or type(out) is not type(args[0]):
            return
        if args[0]._is_view():
            return  # its base holds the storage as well: the first gradient of a matrix is a view, and is not added to
        [term], [result] = _storages(args[0]), _storages(out)
        self._ledger.note_sum(term, result)

    def _kind_of(self, tensor: torch.Tensor, moment: str, *, recomputes: bool) -> str:
        if Recorder.label is not None:
            return Recorder.label
        if tensor.is_floating_point() and tensor.dim() > 1 and tensor.shape[-1] in self._vocabulary:
            return OTHER if moment == OPTIMIZER else LOGITS
        return ACTIVATIONS if moment in (FORWARD, LOSS) or recomputes else OTHER

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            # An optimizer reads its step count, but a fake tensor has no value. Only shapes matter here; if memory does
            # depend on the value, the verifying step will show it. Asked whether it equals another, it does not: there
            # are targets, and losses are not 0.
            if args[0].dtype == torch.bool:
                return self._equality is None or self._equality() is not args[0]
            return 1
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked for more often than anything is computed
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it comes back as what this device computes, and its collectives
        kwargs = kwargs or {}
        self._ledger.forget_sum()
        out = func(*args, **kwargs)
        if func in (torch.ops.aten.eq.Scalar, torch.ops.aten.eq.Tensor) and out.dim() == 0:
            self._equality = weakref.ref(out)
        in_backward = torch._C._current_graph_task_id() != -1
        recomputes = in_backward and self._depth > 0
        if in_backward:
            self._moment = BACKWARD
        elif self._moment == BACKWARD:
            self._moment = OPTIMIZER  # clipping and scaling of the gradient included
        moment = OPTIMIZER if self._in_optimizer else self._moment
        for value in tree_iter(out):
            if isinstance(value, torch.Tensor):
                for storage in _storages(value):
                    if not self._ledger.knows(storage):
                        kind = self._kind_of(value, moment, recomputes=recomputes)
                        counts = not Recorder.fused and _device_type(value) == self._device_type
                        self._ledger.allocate(storage, kind, storage.nbytes() if counts else 0, Recorder.stream)
        if self._handles and func in MATRIX_PRODUCTS and not Recorder.fused:
            self._ledger.note_need(self._handles[in_backward], Recorder.stream)
        if Recorder.in_place_of is not None and isinstance(out, torch.Tensor):
            self._ledger.write_over(_storages(Recorder.in_place_of)[0], _storages(out)[0])
        flops = flops_of(func, args, kwargs, out)
        self._flops += flops
        self._recomputed_flops += flops if recomputes else 0
        self._attention_flops += flops if is_attention(func) and not recomputes else 0
        scratch = scratch_of(func, args) if self._on_cuda and not Recorder.fused else None
        self._ledger.end_operation(moment, scratch)
        if in_backward and func is torch.ops.aten.add.Tensor and _called_by_autograd(sys._getframe(1)):
            self._note_sum(args, out)
        return out


def _called_by_autograd(frame: Any) -> bool:
    """True if ``frame``, wrappers aside, is autograd's call of its engine, with no Python in between.

    On a device other than the CPU the engine runs in a thread of its own, in which nothing has called it.
    """
    while frame is not None and frame.f_code.co_filename.endswith(_WRAPPERS):
        frame = frame.f_back
    return frame is None or frame.f_code.co_name == "_engine_run_backward"


def state_tensors(optimizers: Sequence[Optimizer]) -> list[torch.Tensor]:
    values = [value for o in optimizers for state in o.state.values() for value in state.values()]
    return [value for value in values if isinstance(value, torch.Tensor)]


@contextlib.contextmanager
def labelled(kind: str) -> Iterator[None]:
    before, Recorder.label = Recorder.label, kind
    try:
        yield
    finally:
        Recorder.label = before


@contextlib.contextmanager
def on_stream(number: int) -> Iterator[None]:
    before, Recorder.stream = Recorder.stream, number
    try:
        yield
    finally:
        Recorder.stream = before


def _device_type(tensor: torch.Tensor) -> str:
    """Return the device of a tensor's storage; of a tensor with others inside, theirs, as it may name another."""
    while is_traceable_wrapper_subclass(tensor):
        tensor = getattr(tensor, tensor.__tensor_flatten__()[0][0])
    return tensor.device.type


def _storages(tensor: torch.Tensor) -> list[Any]:
    """Return the storages of a tensor and of those inside it, in the same order in each trace."""
    return sorted(get_untyped_storages(tensor), key=lambda storage: storage.nbytes())
