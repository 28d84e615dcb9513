"""Read from a call of a torch operation what it asks of a device: bytes, and the work of products and attention."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from adaptive_batching._dry_run.time.step_work import Operation

# Of a large table they read what they write, not all of it.
_SPARSE = {
    "embedding", "index", "index_select", "gather", "slice_backward", "select_backward", "embedding_dense_backward",
    "nll_loss_forward",
}  # fmt: skip
_SCATTERS = {"index_put_", "_index_put_impl_", "scatter_", "scatter", "scatter_add_", "index_add_", "index_add"}
_SECTOR = 64  # bytes that are read of a row of which one number is needed
_OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "_foreach_copy_", "_foreach_zero_"}
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "addmv", "mv", "dot"}
_MAKES = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "detach", "alias", "lift_fresh"}
_ATEN = torch.ops.aten
ON_CPU: dict[Any, Any] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _ATEN._scaled_dot_product_flash_attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _ATEN._scaled_dot_product_flash_attention_backward,
}
"""What stands in for an operation where there is no CUDA."""

_IN_ONE_KERNEL = 50  # tensors of a list, roughly


def operation(
    func: Any, args: Any, kwargs: Any, out: Any, read: list[torch.Tensor], written: list[torch.Tensor], launches: int,
    where: str,
) -> Operation:  # fmt: skip
    """Return what an operation of torch asks for.

    Args:
        func: The operation, with its arguments and result.
        read: Tensors that it was given.
        written: Tensors that it returned, or has changed where it returns nothing.
        launches: Kernels that it started.
        where: The line that asked for it.
    """
    packet = _packet_of(func)
    name, inputs = packet.__name__, each_once(read)
    dtype = str(inputs[0].dtype if inputs else "").removeprefix("torch.")
    # The older `allow_tf32` cannot be read any more where a script has set one of these.
    of_kind: Any = torch.backends.cuda.matmul
    if "conv" in name:
        of_kind = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    if dtype == "float32" and of_kind.fp32_precision == "tf32":
        dtype = "tf32"
    moved = _bytes_moved(func, name, inputs, written)
    if packet not in flop_registry:
        return Operation("kernel", name, moved, dtype=dtype, launches=launches, where=where)
    if "conv" in name:
        flops = _flops_of_convolution(name, args, out)
        return Operation("convolution", name, moved, flops, dtype, launches=launches, where=where)
    if name in _PRODUCTS:  # torch's formulas do not know all of their overloads
        left = args[1] if name.startswith(("add", "badd")) else args[0]
        shape = (*written[0].shape, left.shape[-1])
        is_aligned = all(map(_is_aligned, (*inputs, written[0])))
        return Operation(
            "product", name, moved, 2 * math.prod(shape), dtype, shape, launches, is_aligned=is_aligned, where=where
        )
    flops = flops_of(func, args, kwargs, out) or 0
    if "attention" in name:
        is_causal = any(value is True for value in (*args, *kwargs.values()))
        flops = flops // 2 if is_causal else flops
        return Operation("attention", name, moved, flops, dtype, launches=launches, where=where)
    return Operation("product", name, moved, flops, dtype, launches=launches, where=where)


def _is_aligned(tensor: torch.Tensor) -> bool:
    """Return False for a matrix in half precision whose rows, or columns, do not begin at multiples of 16 bytes."""
    if tensor.element_size() != 2 or tensor.dim() < 2:
        return True
    return all(stride == 1 or stride % 8 == 0 for stride in tensor.stride()[-2:])


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int | None:
    """Return the floating-point operations of a product or of attention, as if nothing were masked; None for others."""
    packet = _packet_of(func)
    if packet not in flop_registry:
        return None
    if "scaled_dot_product" in packet.__name__:  # torch 2.11 takes grouped heads for a mistake
        in_backward = packet.__name__.endswith("backward")
        query, key, value = args[1:4] if in_backward else args[:3]  # [b, heads, s, d]
        pairs = query.shape[:-1].numel() * key.shape[-2]
        of_scores, of_values = (3, 2) if in_backward else (1, 1)  # products, scores computed again in the backward pass
        return int(2 * pairs * (of_scores * query.shape[-1] + of_values * value.shape[-1]))
    return int(flop_registry[packet](*args, **kwargs, out_val=out))


def _packet_of(func: Any) -> Any:
    packet = getattr(func, "overloadpacket", func)
    return ON_CPU.get(packet, packet)


def expected_launches(func: Any, tensors: list[torch.Tensor]) -> int:
    """Return how many kernels an operation starts where no device counts them: none for a view, else about one."""
    name = getattr(func, "overloadpacket", func).__name__
    if getattr(func, "is_view", False) or name in _MAKES or not tensors:
        return 0
    return max(1, len(tensors) // _IN_ONE_KERNEL) if name.startswith(("_foreach", "_fused")) else 1


def _bytes_moved(func: Any, name: str, read: list[torch.Tensor], written: list[torch.Tensor]) -> int:
    if name == "nll_loss_forward":
        return _SECTOR * read[1].numel()
    if "batch_norm" in name:  # what is normalized is read for its mean first, and so are gradients
        of_inputs = sum(bytes_of(x) for x in read if x.dim() > 1)
        return 2 * of_inputs + bytes_of(written[0])
    if name in _SPARSE:
        largest = max(map(bytes_of, written), default=0)
        of_indices = sum(bytes_of(x) for x in read if x.dim() < 2)
        return largest + min(sum(map(bytes_of, read)), largest + of_indices)
    if name in _SCATTERS:
        return 3 * sum(map(bytes_of, read[1:]))
    if name in _OVERWRITES or getattr(func, "_overloadname", "") in ("out", "dtype_out"):
        return sum(map(bytes_of, read))
    return sum(map(bytes_of, read)) + sum(map(bytes_of, written))


def _flops_of_convolution(name: str, args: Any, out: Any) -> int:
    """Return the operations of a convolution; torch's formula of its backward pass takes no heed of groups."""
    is_backward = "backward" in name
    result, given, weight = (args[0], args[1], args[2]) if is_backward else (out, args[0], args[1])
    positions = (given if args[7 if is_backward else 6] else result).shape  # transposed: of what is given
    once: int = 2 * weight.numel() * positions[0] * math.prod(positions[2:])
    return once * sum(int(asked) for asked in args[-1][:2]) if is_backward else once


def tensors_of(values: Any, device_type: str = "cuda") -> list[torch.Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor) and x.device.type == device_type]


def each_once(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return list({(memory_of(x), x.storage_offset(), x.numel()): x for x in tensors}.values())


def memory_of(tensor: torch.Tensor) -> int:
    """Return a number of a tensor's memory, which a fake one has not, and a sharded one may have given back."""
    return int(tensor.untyped_storage()._cdata)


def bytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes that are there: what is expanded counts once."""
    number = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        number *= size if stride else 1
    return number * tensor.element_size()
