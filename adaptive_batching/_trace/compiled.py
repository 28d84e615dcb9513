"""Run compiled regions as Inductor would, on fake tensors: split where it splits, without what it fuses away.

``torch.compile`` traces forward and backward of a region together, and a minimal cut decides what is kept between them
and what is computed again. Here the same partitioner of AOTAutograd splits the same graph, with Inductor's
decompositions. Then the graph runs operation by operation, in the order of Inductor's kernels. A kernel reads what it
needs from memory, keeps what only itself reads in registers, which takes none, and makes all of its results before any
of its inputs can be freed. Results that share inputs come from one kernel, so that one that the graph computes later is
made with the first. A result takes the place of an input that nothing reads after it.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import FunctionType
from typing import Any
from unittest import mock

import torch
from functorch.compile import aot_function, min_cut_rematerialization_partition  # type: ignore[import-untyped]
from torch import nn
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_flatten, tree_unflatten

from adaptive_batching._trace.recorder import Recorder

_aten = torch.ops.aten
_MATRIX_PRODUCTS = (_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten._grouped_mm)
_VIEWS = (
    _aten.view, _aten._unsafe_view, _aten.reshape, _aten.permute, _aten.transpose, _aten.t, _aten.unsqueeze,
    _aten.squeeze, _aten.expand, _aten.slice, _aten.split, _aten.split_with_sizes, _aten.select, _aten.alias,
    _aten.detach, _aten.as_strided,
)  # fmt: skip
_REDUCTIONS = ("sum", "mean", "amax", "amin", "prod", "argmax", "argmin", "var", "any", "all")
_INPUT = object()  # in the place of an argument that is a tensor


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
        others = [_INPUT if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        shapes = [(t.shape, t.stride(), t.dtype, t.requires_grad) for t in [*tensors, *inputs]]
        key = (repr(others), spec, str(shapes), torch.is_grad_enabled())

        def function(tensors: list[torch.Tensor], inputs: list[torch.Tensor]) -> Any:
            given = iter(inputs)
            filled = [next(given) if other is _INPUT else other for other in others]
            return self._function(tensors, *tree_unflatten(filled, spec))

        if key not in self._compiled:
            self._compiled[key] = aot_function(
                function, fw_compiler=_as_fused, bw_compiler=_as_fused,
                partition_fn=min_cut_rematerialization_partition, decompositions=select_decomp_table(),
            )  # fmt: skip
        # AOTAutograd asks a CUDA device for its random state. Where nothing has used the device yet, a plan needs none,
        # and checkpointing refuses a device that is first used in a forward of its own.
        there: bool = torch.cuda.is_initialized() and torch.cuda.is_available()  # type: ignore[no-untyped-call]
        with mock.patch.object(torch.cuda, "is_available", lambda: there):
            return self._compiled[key](tensors, inputs)


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
        return [_spelled(part) for part in value]
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


class Schedule:
    """How Inductor would run the forward or backward of a compiled region, as AOTAutograd has split it.

    The rules are those of ``torch/_inductor/scheduler.py``, without what depends on a device: nodes are fused if one
    reads the other or they share an input, if they run over as many elements, and if no other kernel has to run in
    between (``can_fuse``, ``will_fusion_create_cycle``); a kernel runs where the first of its nodes stood
    (``topological_sort_schedule``); ``decide_inplace_update`` says what is made in place.
    """

    def __init__(self, graph: Graph) -> None:
        self._nodes = list(graph.nodes)
        self._index = {node: number for number, node in enumerate(self._nodes)}
        # Nodes whose results are written to memory: for a kernel of its own, by one, or to be returned.
        self.stored: set[Node] = set()
        for node in reversed(self._nodes):  # users first
            needs = (_is_library_call(u) or u.op == "output" or (_is_view(u) and u in self.stored) for u in node.users)
            if _is_library_call(node) or any(needs):
                self.stored.add(node)
        called = {node for node in self.stored if node.op == "call_function"}
        self._written = {n for n in called if not _is_view(n) and n.target is not operator.getitem}
        self._reads = {node: list(self._sources(node.all_input_nodes)) for node in self._written}
        in_order = sorted(self._written, key=self._index.__getitem__)
        self._kernel: dict[Any, int] = {node: number for number, node in enumerate(in_order)}
        self._members = {number: [node] for node, number in self._kernel.items()}
        self._fuse()
        self.order = self._order()  # of all nodes but placeholders and the output
        self._position = {node: number for number, node in enumerate(self.order)}
        self.last_uses = self._last_uses()  # by node, those whose values nothing needs once it has run
        self.in_place = self._in_place()  # by node, the one whose memory its result is written to

    def _through(self, node: Node) -> bool:
        """True for a node that takes no memory of its own: a view, or what stays in registers."""
        return node.op == "call_function" and node not in self._written and node.target is not operator.getitem

    def _sources(self, nodes: list[Node], seen: set[Node] | None = None) -> Iterator[Node]:
        """Yield what is read from memory to compute with ``nodes``, each once."""
        seen = set() if seen is None else seen
        for node in nodes:
            if node not in seen:
                seen.add(node)
                yield from self._sources(node.all_input_nodes, seen) if self._through(node) else [node]

    def _before(self, kernel: int) -> set[int]:
        """Return the kernels whose results a kernel reads."""
        sources = itertools.chain.from_iterable(self._reads[node] for node in self._members[kernel])
        producers = (source.args[0] if source.target is operator.getitem else source for source in sources)
        return {self._kernel[node] for node in producers if node in self._kernel} - {kernel}

    def _fuse(self) -> None:
        candidates = [n for n in self._kernel if not _is_library_call(n) and _elements(n)]
        pairs = []
        for first, second in itertools.combinations(candidates, 2):
            shared = {*self._reads[first], first} & {*self._reads[second], second}
            size = sum(_elements(node) for node in shared)
            if size and _domain(first) == _domain(second):
                pairs.append((-size, self._index[second] - self._index[first], first, second))
        for _, _, first, second in sorted(pairs, key=lambda pair: pair[:2]):
            one, other = self._kernel[first], self._kernel[second]
            if one != other and not self._separated(one, other) and not self._separated(other, one):
                self._members[one] = sorted(self._members[one] + self._members.pop(other), key=self._index.__getitem__)
                self._kernel.update(dict.fromkeys(self._members[one], one))

    def _separated(self, first: int, last: int) -> bool:
        """True if another kernel reads the first and is read, through however many, by the last."""
        return _leads_to(first, self._before(last) - {first}, self._before)

    def _order(self) -> list[Node]:
        order: list[Node] = []
        emitted: set[Node] = set()
        done: set[int] = set()

        def emit(node: Node) -> None:
            if node in emitted or node.op != "call_function":
                return
            for needed in node.all_input_nodes:
                if needed not in self._written:
                    emit(needed)
            emitted.add(node)
            order.append(node)
            for user in node.users:  # parts of a result are told apart at once
                if user.target is operator.getitem:
                    emit(user)

        def run(kernels: Iterable[int]) -> None:
            for kernel in sorted(kernels, key=lambda k: self._index[self._members[k][0]]):
                if kernel not in done:
                    done.add(kernel)
                    run(self._before(kernel))
                    for node in self._members[kernel]:
                        emit(node)

        run(self._members)
        for node in self._nodes:
            emit(node)
        return order

    def _last_uses(self) -> dict[Node, list[Node]]:
        end, position = len(self.order), self._position
        last: dict[Node, int] = {}

        def last_use(node: Node) -> int:
            if node not in last:
                last[node] = max((use_of(user) for user in node.users), default=position.get(node, -1))
            return last[node]

        def use_of(user: Node) -> int:
            if user.op == "output":
                return end
            if user in self._kernel:  # nothing that a kernel reads is free before all of its results are there
                return max(position[node] for node in self._members[self._kernel[user]])
            return max(position[user], last_use(user) if self._through(user) else -1)

        uses: dict[Node, list[Node]] = {}
        for node in reversed(self._nodes):
            if node.op != "output" and 0 <= last_use(node) < end:
                uses.setdefault(self.order[last_use(node)], []).append(node)
        return uses

    def _in_place(self) -> dict[Node, Node]:
        in_place: dict[Node, Node] = {}
        readers: defaultdict[Node, list[Node]] = defaultdict(list)
        for node, reads in self._reads.items():
            for read in reads:
                readers[read].append(node)
        returned = set(self._sources(self._nodes[-1].all_input_nodes))
        for node in (written for written in self._kernel if not _is_library_call(written)):
            for read in self._reads[node]:
                is_free = read not in returned and not read.name.startswith(("primals", "tangents"))
                alike = _elements(read) == _elements(node) and read.meta["val"].dtype == node.meta["val"].dtype
                over = all(self._is_over(reader, node) for reader in readers[read] if reader is not node)
                if is_free and alike and over and read not in in_place.values():
                    in_place[node] = read
                    break
        return in_place

    def _is_over(self, first: Node, last: Node) -> bool:
        """True if ``first`` has read its inputs before ``last`` is written: in one kernel, if it leads to it."""
        if self._position[first] >= self._position[last]:
            return False
        if self._kernel[first] != self._kernel[last]:
            return True
        return _leads_to(first, [last], lambda node: self._reads.get(node, []))


def _leads_to(first: Any, last: Iterable[Any], before: Callable[[Any], Iterable[Any]]) -> bool:
    """True if ``first`` comes before any of ``last``, through however many others."""
    left = list(last)
    seen = set(left)
    while left:
        for other in before(left.pop()):
            if other == first:
                return True
            if other not in seen:
                seen.add(other)
                left.append(other)
    return False


def _domain(node: Node) -> int:
    """Return over how many elements a node runs: those of its result, or of what it reduces."""
    reduces = getattr(_packet(node), "__name__", "") in _REDUCTIONS
    return max(map(_elements, [node, *(node.all_input_nodes if reduces else [])]))


def _elements(node: Node) -> int:
    value = node.meta.get("val")
    return math.prod(value.shape) if isinstance(value, torch.Tensor) else 0


def _packet(node: Node) -> Any:
    return getattr(node.target, "_overloadpacket", None)


def _is_view(node: Node) -> bool:
    return _packet(node) in _VIEWS


def _is_library_call(node: Node) -> bool:
    """True for an operation that Inductor calls a library for, and fuses nothing into."""
    is_call = node.op == "call_function"
    return is_call and (_packet(node) in _MATRIX_PRODUCTS or "scaled_dot_product" in str(node.target))
