"""Note what a step asks of the emulated device: products with their shapes, bytes of other kernels, collectives, waits.

Operations are seen in torch's dispatch, those of the backward pass included; Triton's kernels, which no dispatcher
sees, by the arguments of their launchers; what a graph has captured, each time that it is replayed. How many kernels an
operation starts is what the device has counted.
"""

from __future__ import annotations

import functools
import math
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from adaptive_batching._dry_run.device import control
from adaptive_batching._dry_run.history import is_of_torch, line_of
from adaptive_batching._dry_run.time.operations import (
    bytes_of,
    each_once,
    expected_launches,
    memory_of,
    operation,
    tensors_of,
)
from adaptive_batching._dry_run.time.step_work import Operation, StepWork
from adaptive_batching._values import first_line

_PLAIN = {torch.Tensor, torch.nn.Parameter}
_OF_TORCH = {"aten", "prim", "prims", "c10d", "_c10d_functional", "fsdp", "inductor", "quantized", "torchvision"}
_ON_DEVICE = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
_STARTED = ("kernel", "product", "attention", "convolution")
_OF_COMPILERS = {"FakeTensor", "FunctionalTensor"}
_NUMELS = ("xnumel", "ynumel", "znumel", "r0_numel", "r1_numel")


class Collector(TorchDispatchMode):
    """Notes operations while it is entered; it changes nothing that a step computes or holds."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trouble: str | None = None
        """Why nothing is noted any more."""
        self._is_on = False
        self._noted = 0  # kernels
        self._numbers: dict[Operation, int] = {}
        self._order: list[int] = []
        self._lines: dict[int, str] = {}  # that recorded a node of autograd, by its number
        self._sent: dict[int, int] = {}  # memory that a collective writes: how many had been asked for
        self._collectives = 0
        self._captured: weakref.WeakKeyDictionary[torch.cuda.CUDAGraph, list[int]] = weakref.WeakKeyDictionary()
        self._is_capturing = False
        self._watched: set[str] = set()  # modules whose launchers are looked at

    def begin(self) -> None:
        """Look at graphs from now on, which are captured long before they are replayed."""
        self._watch_graphs()

    def start(self) -> None:
        """Note what follows; the caller's thread is the one that trains, and no backward pass is under way."""
        self._watch_triton()
        self._is_on = True
        self.__enter__()  # type: ignore[no-untyped-call]

    def result(self) -> StepWork:
        """Return what was noted since the start."""
        return StepWork(list(self._numbers), list(self._order))

    # Operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        others = [kind for kind in types if kind not in _PLAIN]
        if any(kind.__name__ not in _OF_COMPILERS for kind in others):
            return NotImplemented  # a subclass says itself what it is made of
        started, waited, parts = *control.started_and_waited(), self._noted
        if not others and _is_composite(func):  # which comes from within a library's own operation
            with self:
                return func.decompose(*args, **kwargs)
        if not others and _has_parts(func):
            with self:
                out = func.redispatch(_ON_DEVICE, *args, **kwargs)
        else:
            out = func(*args, **kwargs)
        if not others:  # else it is compiled, not run
            started_later, waited_later = control.started_and_waited()
            parts = self._noted - parts
            launches = started_later - started - parts
            if launches or not parts:
                self._try(self._note, func, args, kwargs, out, launches, waited_later - waited)
        return out

    def _try(self, note: Callable[..., None], name: Any, *noted: Any) -> None:
        """Note something, or else why that failed: a report watches, and breaks nothing."""
        if self.trouble is None:
            try:
                note(name, *noted)
            except Exception as error:
                self.trouble = f"{name}: {type(error).__name__}, {first_line(error)}"

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any, launches: int, waits: int) -> None:
        name = getattr(func, "overloadpacket", func).__name__
        read, written = tensors_of((args, kwargs)), tensors_of(out)
        if "c10d" in getattr(func, "namespace", ""):
            self._note_collective(name, args, read + written)
            return
        self._note_arrivals(read, written)
        if self._is_capturing:
            launches, waits = expected_launches(func, read), 0
        if name in ("copy_", "_to_copy") and _crosses(args, out):
            self._add(Operation("transfer", name, max(map(bytes_of, read + written), default=0), where=self._where()))
            launches = 0
        if launches:
            if out is None:  # in place, of a list
                arguments = zip(args, func._schema.arguments, strict=False)
                written = tensors_of([a for a, of in arguments if of.alias_info and of.alias_info.is_write])
            self._add(operation(func, args, kwargs, out, read, written, launches, self._where()))
        if waits:
            self._add(Operation("wait", name))

    def _note_collective(self, name: str, args: Any, tensors: list[torch.Tensor]) -> None:
        ranks, total = _ranks_of(args), sum(map(bytes_of, each_once(tensors)))
        if "gather" in name or "scatter" in name:
            total = total * ranks // (ranks + 1)  # the whole, with one rank's part of it
        self._add(Operation("collective", name, total, ranks=ranks, where=self._where()))
        self._collectives += 1
        self._sent.update({memory_of(tensor): self._collectives for tensor in tensors})

    def _note_arrivals(self, read: Iterable[torch.Tensor], written: Iterable[torch.Tensor]) -> None:
        """Have the device wait for a collective, at the first operation on what that has written.

        What follows a collective on a stream of its own, such as a cast of gradients, is waited for in its place.
        """
        awaited = max((self._sent.get(memory_of(x), 0) for x in read), default=0) if self._sent else 0
        if not awaited:
            return
        if torch.cuda.current_stream() != torch.cuda.default_stream():
            self._sent.update({memory_of(x): awaited for x in written})
            return
        for x in read:
            self._sent.pop(memory_of(x), None)
        self._add(Operation("arrival", "", ranks=self._collectives - awaited, where=self._where()))

    def _add(self, one: Operation) -> None:
        self._noted += one.launches if one.kind in _STARTED else 0
        self._order.append(self._numbers.setdefault(one, len(self._numbers)))

    def _where(self) -> str:
        """Return the line that asks for an operation: in the backward pass, the one whose backward pass it is."""
        frame = sys._getframe(2)
        while frame is not None and _is_of_torch(frame.f_code.co_filename):
            frame = frame.f_back  # type: ignore[assignment]
        is_backward = torch._C._current_graph_task_id() != -1
        if is_backward and (frame is None or not _is_recomputed(frame)):
            node = torch._C._current_autograd_node()
            line = None if node is None else self._lines.get(node._sequence_nr())
            return line or "backward pass"
        if frame is None:
            return ""
        line = line_of({"filename": frame.f_code.co_filename, "line": frame.f_lineno, "name": frame.f_code.co_name})
        if not is_backward:
            self._lines[torch._C._autograd._get_sequence_nr() - 1] = line
        return line

    # What no dispatcher sees

    def _watch_triton(self) -> None:
        """Look at the launchers of Triton and of Inductor, if either is there; importing them takes seconds."""
        launchers = {
            "torch._inductor.runtime.triton_heuristics": ("CachingAutotuner", self._noting_inductor),
            "triton.runtime.jit": ("JITFunction", self._noting_triton),
        }
        for module, (name, noting) in launchers.items():
            if module in sys.modules and module not in self._watched:
                self._watched.add(module)
                launcher = getattr(sys.modules[module], name)
                launcher.run = noting(launcher.run)

    def _noting_inductor(self, run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def note_and_run(kernel: Any, *args: Any, stream: Any, benchmark_run: bool = False, **kwargs: Any) -> Any:
            if self._is_on and not benchmark_run:
                names = list(kernel.triton_meta["signature"])
                numels = [x for name, x in zip(names, args, strict=False) if name in _NUMELS and isinstance(x, int)]
                name = kernel.inductor_meta.get("kernel_name", kernel.fn.__name__)
                self._try(self._note_kernel, name, names, args, math.prod(numels))
            return run(kernel, *args, stream=stream, benchmark_run=benchmark_run, **kwargs)

        return note_and_run

    def _noting_triton(self, run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def note_and_run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            if self._is_on and not warmup:
                self._try(self._note_kernel, kernel.__name__, [""] * len(args), args, 1)
            return run(kernel, *args, grid=grid, warmup=warmup, **kwargs)

        return note_and_run

    def _note_kernel(self, name: str, names: list[str], args: Any, numel: int) -> None:
        """Note a kernel by the tensors that it is given, of which it takes as many elements as it has to do."""
        sizes: dict[int, int] = {}
        again = 0
        for key, x in zip(names, args, strict=False):
            if isinstance(x, torch.Tensor):
                size = min(bytes_of(x), numel * x.element_size()) if numel > 1 else bytes_of(x)
                sizes[x.data_ptr()] = size
                again += size if key.startswith("in_out") else 0
        self._note_arrivals([x for x in args if isinstance(x, torch.Tensor)], ())
        self._add(Operation("kernel", name, sum(sizes.values()) + again, where=self._where()))

    def _watch_graphs(self) -> None:
        graph_class: Any = torch.cuda.CUDAGraph
        begin, end, replay = graph_class.capture_begin, graph_class.capture_end, graph_class.replay
        before: list[Any] = []

        @functools.wraps(begin)
        def begin_and_note(graph: Any, *args: Any, **kwargs: Any) -> None:
            begin(graph, *args, **kwargs)
            before.append((self._is_on, self._order))
            self._order, self._is_capturing, self._is_on = [], True, True
            self._watch_triton()
            self.__enter__()  # type: ignore[no-untyped-call]

        @functools.wraps(end)
        def end_and_note(graph: Any) -> None:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            captured = self._order
            (self._is_on, self._order), self._is_capturing = before.pop(), False
            operations = list(self._numbers)
            of_graph = [replace(operations[number], launches=0) for number in captured]
            self._captured[graph] = [self._numbers.setdefault(one, len(self._numbers)) for one in of_graph]
            end(graph)

        @functools.wraps(replay)
        def replay_and_note(graph: Any) -> None:
            if self._is_on:
                self._add(Operation("kernel", "launch of a graph"))
                self._order += self._captured.get(graph, [])
            replay(graph)

        graph_class.capture_begin, graph_class.capture_end = begin_and_note, end_and_note
        graph_class.replay = replay_and_note


def _crosses(args: Any, out: Any) -> bool:
    return len({x.device.type for x in tree_leaves((args, out)) if isinstance(x, torch.Tensor)}) > 1


def _ranks_of(args: Any) -> int:
    """Return how many ranks take part in a collective: of its group, which is passed in several ways, or in all."""
    distributed: Any = torch.distributed.distributed_c10d
    ways: list[tuple[type, Callable[[Any], int]]] = [
        (torch.ScriptObject, lambda group: torch.distributed.ProcessGroup.unbox(group).size()),
        (int, lambda size: size if size > 1 else 0),
        (str, lambda name: distributed._resolve_process_group(name).size()),
    ]
    for kind, size_of in ways:
        for value in args:
            if isinstance(value, kind) and not isinstance(value, bool):
                try:
                    if size := size_of(value):
                        return int(size)
                except Exception:
                    continue  # another object, or another text
    return torch.distributed.get_world_size()


@functools.cache
def _has_parts(func: Any) -> bool:
    """True for an operation of a library other than torch, which may be written in Python: its parts are noted."""
    is_of_torch = not isinstance(func, torch._ops.OpOverload) or func.namespace in _OF_TORCH
    return not is_of_torch and _has_kernel(func, "CUDA")


@functools.cache
def _is_composite(func: Any) -> bool:
    """True for an operation that is made of others, on every device."""
    is_one = isinstance(func, torch._ops.OpOverload) and _has_kernel(func, "CompositeImplicitAutograd")
    return is_one and not _has_kernel(func, "CUDA")


def _has_kernel(func: Any, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))


@functools.cache
def _is_of_torch(file: str) -> bool:
    return is_of_torch(file)


def _is_recomputed(frame: Any) -> bool:
    """True in a forward pass that activation checkpointing runs again: the line that calls for gradients is not."""
    while frame is not None:
        if frame.f_code.co_name in ("recompute_fn", "unpack_hook", "inner_unpack") or (
            frame.f_code.co_name == "backward" and frame.f_code.co_filename.endswith("checkpoint.py")
        ):
            return True
        frame = frame.f_back
    return False
