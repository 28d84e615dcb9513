"""What a step asks of a device, in order. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, Literal

Kind = Literal["kernel", "product", "attention", "convolution", "collective", "arrival", "transfer", "wait"]
"""`arrival`: the device goes on when a collective is over; `wait`: the host goes on when the device is done."""


@dataclass(frozen=True)
class Operation:
    """Something that a step asks for, once or more often."""

    kind: Kind
    name: str
    bytes: int = 0
    """Read and written; of a collective, what all ranks together hold of it; of a transfer, what is copied."""

    flops: int = 0
    dtype: str = ""
    """Of the factors of a product, as torch names it; `tf32` for float32 where tensor cores may take it."""

    shape: tuple[int, ...] = ()
    """Of a product: batches, rows, columns and the length of its sums."""

    launches: int = 1
    """Kernels that the host starts for it; 0 in a graph, which starts them itself."""

    ranks: int = 1
    """Of a collective: how many take part; of an arrival: how many collectives were asked for after that one."""

    is_aligned: bool = True
    """False for a product in half precision with rows that do not begin at multiples of 16 bytes."""

    where: str = ""
    """The line of code that asked for it, also in the backward pass of that line."""


_NAMES = [field.name for field in fields(Operation)]


@dataclass(frozen=True)
class StepWork:
    """A step: its operations, and the order in which they were asked for, by their numbers."""

    operations: Sequence[Operation]
    order: Sequence[int]

    def as_object(self) -> dict[str, Any]:
        return {
            "operations": [astuple(operation) for operation in self.operations],
            "order": list(self.order),
        }

    @classmethod
    def from_object(cls, written: dict[str, Any]) -> StepWork:
        operations = [
            Operation(**{**dict(zip(_NAMES, values, strict=True)), "shape": tuple(values[_NAMES.index("shape")])})
            for values in written["operations"]
        ]
        return cls(operations, written["order"])
