"""Which operations of a graph Inductor would run as one kernel, in what order, and what is alive meanwhile.

A kernel reads what it needs from memory, keeps what only itself reads in registers, and makes all of its results before
any of its inputs can be freed. Results that share inputs come from one kernel, so that one that the graph computes
later is made with the first. A result takes the place of an input that nothing reads after it.

The rules are those of ``torch/_inductor/scheduler.py``, without what depends on a device: nodes are fused if one reads
the other or they share an input, if they run over as many elements, and if no other kernel has to run in between
(``can_fuse``, ``will_fusion_create_cycle``); a kernel runs where the first of its nodes stood
(``topological_sort_schedule``); ``decide_inplace_update`` says what is made in place.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

_aten = torch.ops.aten
_MATRIX_PRODUCTS = (_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten._grouped_mm)
_VIEWS = (
    _aten.view, _aten._unsafe_view, _aten.reshape, _aten.permute, _aten.transpose, _aten.t, _aten.unsqueeze,
    _aten.squeeze, _aten.expand, _aten.slice, _aten.split, _aten.split_with_sizes, _aten.select, _aten.alias,
    _aten.detach, _aten.as_strided,
)  # fmt: skip
_REDUCTIONS = ("sum", "mean", "amax", "amin", "prod", "argmax", "argmin", "var", "any", "all")


class Schedule:
    """How Inductor would run the forward or backward of a compiled region, as AOTAutograd has cut it."""

    def __init__(self, graph: Graph) -> None:
        self._nodes = list(graph.nodes)
        self._index = {node: number for number, node in enumerate(self._nodes)}
        self.stored = self._find_stored()
        """Nodes whose results are written to memory: for a kernel of its own, by one, or to be returned."""

        called = {node for node in self.stored if node.op == "call_function"}
        self._written = {n for n in called if not _is_view(n) and n.target is not operator.getitem}
        self._reads = {node: list(self._sources(node.all_input_nodes)) for node in self._written}
        in_order = sorted(self._written, key=self._index.__getitem__)
        self._kernel: dict[Any, int] = {node: number for number, node in enumerate(in_order)}
        self._members = {number: [node] for node, number in self._kernel.items()}
        self._fuse()
        self.order = self._order()
        """All nodes but placeholders and the output."""

        self._position = {node: number for number, node in enumerate(self.order)}
        self.last_uses = self._last_uses()
        """By node, those whose values nothing needs once it has run."""

        self.in_place = self._in_place()
        """By node, the one whose memory its result is written to."""

    def _find_stored(self) -> set[Node]:
        stored: set[Node] = set()
        for node in reversed(self._nodes):  # users first
            through_view = any(_is_view(user) and user in stored for user in node.users)
            is_read = any(_is_library_call(user) or user.op == "output" for user in node.users)
            if _is_library_call(node) or is_read or through_view:
                stored.add(node)
        return stored

    def _through(self, node: Node) -> bool:
        """True for a node that takes no memory of its own: a view, or what stays in registers."""
        return node.op == "call_function" and node not in self._written and node.target is not operator.getitem

    def _sources(self, nodes: list[Node], seen: set[Node] | None = None) -> Iterator[Node]:
        """Yield what is read from memory to compute with ``nodes``, each once."""
        seen = set() if seen is None else seen
        for node in nodes:
            if node in seen:
                continue
            seen.add(node)
            if self._through(node):
                yield from self._sources(node.all_input_nodes, seen)
            else:
                yield node

    def _before(self, kernel: int) -> set[int]:
        """Return the kernels whose results a kernel reads."""
        sources = itertools.chain.from_iterable(self._reads[node] for node in self._members[kernel])
        made = (source.args[0] if source.target is operator.getitem else source for source in sources)
        return {self._kernel[node] for node in made if node in self._kernel} - {kernel}

    def _fuse(self) -> None:
        candidates = [n for n in self._kernel if not _is_library_call(n) and _elements(n)]
        pairs = []
        for first, second in itertools.combinations(candidates, 2):
            shared = {*self._reads[first], first} & {*self._reads[second], second}
            size = sum(_elements(node) for node in shared)
            if size and self._domain(first) == self._domain(second):
                pairs.append((-size, self._index[second] - self._index[first], first, second))
        for _, _, first, second in sorted(pairs, key=lambda pair: pair[:2]):
            one, other = self._kernel[first], self._kernel[second]
            if one != other and not self._separated(one, other) and not self._separated(other, one):
                self._members[one] = sorted(self._members[one] + self._members.pop(other), key=self._index.__getitem__)
                self._kernel.update(dict.fromkeys(self._members[one], one))

    def _domain(self, node: Node) -> int:
        """Return over how many elements a node runs: those of its result, or of what it reduces."""
        name = getattr(_packet(node), "__name__", "")
        reduced = node.all_input_nodes if name in _REDUCTIONS else []
        return max(map(_elements, [node, *reduced]))

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

        def run(kernel: int) -> None:
            if kernel in done:
                return
            done.add(kernel)
            for each in sorted(self._before(kernel), key=lambda k: self._index[self._members[k][0]]):
                run(each)
            for node in self._members[kernel]:
                emit(node)

        for kernel in sorted(self._members, key=lambda k: self._index[self._members[k][0]]):
            run(kernel)
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
        readers: dict[Node, list[Node]] = {}
        for node, reads in self._reads.items():
            for read in reads:
                readers.setdefault(read, []).append(node)
        returned = set(self._sources(self._nodes[-1].all_input_nodes))
        for node in self._kernel:
            if _is_library_call(node):
                continue
            for read in self._reads[node]:
                is_free = read not in returned and not read.name.startswith(("primals", "tangents"))
                alike = _elements(read) == _elements(node) and read.meta["val"].dtype == node.meta["val"].dtype
                over = all(self._is_over(each, node) for each in readers[read] if each is not node)
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
        for each in before(left.pop()):
            if each == first:
                return True
            if each not in seen:
                seen.add(each)
                left.append(each)
    return False


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
