"""Run compiled regions as Inductor would, on fake tensors: cut where it cuts, without what it fuses away.

``torch.compile`` traces forward and backward of a region together, and a minimal cut decides what is kept between them
and what is computed again. Here the same partitioner of AOTAutograd cuts the same graph, with Inductor's
decompositions. Then the graph runs operation by operation, and what Inductor would keep in registers, because the only
kernels that read it are those it is fused with, takes no memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import FunctionType
from typing import Any
from unittest import mock

import torch
from functorch.compile import aot_function, min_cut_rematerialization_partition  # type: ignore[import-untyped]
from torch import nn
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule, Interpreter, Node
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_flatten, tree_unflatten

from adaptive_batching._trace.fusion import Schedule
from adaptive_batching._trace.recorder import Recorder


def compile_modules(modules: Iterable[nn.Module]) -> None:
    """Have each module run as a compiled region from now on. Modules that compute alike are compiled once."""
    regions: dict[Any, _Region] = {}
    for module in modules:
        region = regions.setdefault(_likeness(module), _Region(_functional(module)))
        module.__dict__["forward"] = partial(_run_in, region, module)


def compile_function(function: Callable[..., Any]) -> Callable[..., Any]:
    region = _Region(lambda _, args, kwargs: function(*args, **kwargs))
    return lambda *args, **kwargs: region([], args, kwargs)


class _Region:
    """A function of (tensors, args, kwargs), compiled for each kind of input that comes."""

    def __init__(self, function: Callable[[list[torch.Tensor], Any, Any], Any]) -> None:
        self._function = function
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def __call__(self, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        shapes = [(t.shape, t.stride(), t.dtype, t.requires_grad) for t in [*tensors, *inputs]]
        key = (repr(others), spec, str(shapes), torch.is_grad_enabled())

        def function(tensors: list[torch.Tensor], inputs: list[torch.Tensor]) -> Any:
            given = iter(inputs)
            filled = [next(given) if of_tensor else o for of_tensor, o in zip(is_tensor, others, strict=True)]
            return self._function(tensors, *tree_unflatten(filled, spec))

        if key not in self._compiled:
            self._compiled[key] = aot_function(
                function,
                fw_compiler=_as_fused,
                bw_compiler=_as_fused,
                partition_fn=min_cut_rematerialization_partition,
                decompositions=select_decomp_table(),
            )
        with _device_left_alone():
            return self._compiled[key](tensors, inputs)


@contextlib.contextmanager
def _device_left_alone() -> Iterator[None]:
    """Keep AOTAutograd from asking a CUDA device for its random state where nothing has used the device yet.

    A plan needs none, and checkpointing refuses a device that is first used in a forward of its own.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        yield
        return
    with mock.patch.object(torch.cuda, "is_available", lambda: False):
        yield


def _functional(module: nn.Module) -> Callable[[list[torch.Tensor], Any, Any], Any]:
    names = [name for name, _ in [*module.named_parameters(), *module.named_buffers()]]

    def run(tensors: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        with _reparametrize_module(module, dict(zip(names, tensors, strict=True))):
            return type(module).forward(module, *args, **kwargs)  # without the hooks, which are not compiled

    return run


def _run_in(region: _Region, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return region([*module.parameters(), *module.buffers()], args, kwargs)


def _likeness(module: nn.Module) -> str:
    """Return a text that is the same for modules that compute the same with other weights."""
    ignored = vars(nn.Module()).keys()
    lines = []
    for name, part in module.named_modules():
        own = {key: _spelled(value) for key, value in vars(part).items() if key not in ignored}
        lines.append(f"{name} {type(part)} {own} {part.training}")
    tensors = [*module.named_parameters(), *module.named_buffers()]
    lines += [f"{name} {type(t)} {t.shape} {t.dtype} {t.requires_grad}" for name, t in tensors]
    return "\n".join(lines)


def _spelled(value: Any) -> Any:
    """Return what says of an attribute whether two modules have the same; where nothing else does, its identity."""
    if isinstance(value, (int, float, str, bool, type(None), torch.dtype)):
        return value
    if isinstance(value, (tuple, list)):
        return [_spelled(each) for each in value]
    if isinstance(value, partial):
        return _spelled([value.func, *value.args, *value.keywords.items()])
    if isinstance(value, FunctionType):
        return value.__module__, value.__qualname__, [_spelled(cell.cell_contents) for cell in value.__closure__ or ()]
    return id(value)


def _as_fused(module: GraphModule, example_inputs: Any) -> Callable[[list[Any]], Any]:
    """Return a function that runs the graph of ``module`` on a list of inputs, which it empties as it goes."""
    plan = Schedule(module.graph)
    [output] = [node for node in module.graph.nodes if node.op == "output"]
    for node in plan.order:
        output.prepend(node)

    class Run(Interpreter):
        def __init__(self) -> None:
            super().__init__(module)
            self.user_to_last_uses = plan.last_uses

        def run_node(self, node: Node) -> Any:
            before, Recorder.fused = Recorder.fused, node.op == "call_function" and node not in plan.stored
            replaced = plan.in_place.get(node)
            Recorder.in_place_of = None if replaced is None else self.env.get(replaced)
            try:
                return super().run_node(node)
            finally:
                Recorder.fused, Recorder.in_place_of = before, None

    def run(inputs: list[Any]) -> Any:
        return Run().boxed_run(inputs)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
