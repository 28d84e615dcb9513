"""Give counts and comparisons their values, which decide what a program does next; and stand in for cuDNN.

No kernel computes anything on the emulated device, so that a count of tokens would be zero and a mean have nothing to
divide by. Its memory is the host's, though. Behind each kernel of a few elementary functions, the host computes the
same function on the same memory, where all that is given are integers, truth values or single numbers. Losses and
gradients stay zero. A comparison takes numbers as they lie in memory: zeros, except where the host wrote others.
"""

from __future__ import annotations

import atexit
import ctypes
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from adaptive_batching._dry_run.device import control

MOST_ELEMENTS = 2**20
MOST_BYTES = 2**16  # of a byte each: more are the packed numbers of quantized weights
MOST_FILLED = 2**24  # bytes of a mask: to write to all of those that fake quantization makes would take minutes
PLAIN = (torch.Tensor, torch.nn.Parameter)  # and no tensor of another kind, whose memory may be elsewhere
NUMBERS = (bool, int, float, complex)
LONGEST_WAIT = 5000  # milliseconds; another rank may wait for this one
# Overloads that have a kernel of CUDA's
FUNCTIONS = (
    *("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "remainder.Tensor", "floor_divide", "neg", "abs", "sqrt"),
    *("add_.Tensor", "sub_.Tensor", "mul_.Tensor", "div_.Tensor", "fill_.Scalar", "fill_.Tensor", "zero_", "copy_"),
    *("minimum", "maximum", "clamp", "clamp_", "clamp_min", "clamp_max", "where.self", "sign", "pow.Tensor_Scalar"),
    *("sum.dim_IntList", "mean.dim", "prod", "prod.dim_int", "max", "min", "max.dim", "min.dim", "amax", "amin"),
    *("argmax", "argmin", "sort", "sort.stable", "cumsum", "cumprod", "searchsorted.Tensor", "bucketize.Tensor"),
    *("scatter.value", "scatter_.value", "scatter.src", "scatter_.src", "scatter_add", "scatter_add_", "index_add"),
    *("index.Tensor", "index_put_", "index_select", "index_fill_.int_Scalar", "gather", "masked_fill_.Scalar"),
    *("cat", "stack", "flip", "roll", "tril", "triu", "arange.start_out", "reciprocal"),
)
_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")
_COMBINED = ("and", "or", "xor", "not")
# Those that answer with truth values, of numbers of all kinds
QUESTIONS = (
    *(f"{name}{place}.{of}" for name in _COMPARED for place in ("", "_") for of in ("Tensor", "Scalar")),
    *(f"logical_{name}{place}" for name in _COMBINED for place in ("", "_")),
    *(f"bitwise_{name}{place}{'' if name == 'not' else '.Tensor'}" for name in _COMBINED for place in ("", "_")),
    *("isnan", "isfinite", "isposinf", "isneginf", "any", "any.dim", "any.dims", "all", "all.dim", "all.dims"),
)
# Those that answer for large masks as questions do
SET = ("fill_.Scalar", "fill_.Tensor", "zero_", "copy_")
# Whose results, or what they are made of, are as large as what they find
SELECTIONS = (
    "nonzero",
    "masked_select",
    "isin.Tensor_Tensor",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
)
ran: set[str] = set()
"""Operations of this process for which cuDNN would have allocated workspaces."""

_kept: list[Any] = []  # what is registered stays for as long as its library is referred to


def prepare() -> None:
    """Have torch compute counts, and do without cuDNN, whose plans need a real card: attention is flash attention, a
    convolution takes what its results take, and what else cuDNN does torch does itself."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cudnn.enabled = False
    atexit.register(_end_quietly)
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kernels that are replaced
        replaced = {**dict.fromkeys((*FUNCTIONS, *QUESTIONS), _with_values), **dict.fromkeys(SELECTIONS, _by_host)}
        attention = "_scaled_dot_product_cudnn_attention"
        of_cudnn = {
            "convolution": _convolved, "convolution_backward": _convolved_backward,
            attention: _attended, f"{attention}_backward": _attended_backward,
        }  # fmt: skip
        others = {
            "equal": _compared, "_is_all_true": _taken_for_true, "randperm.generator_out": _in_order, "topk": _in_turn,
        }  # fmt: skip
        for name, by in {**replaced, **of_cudnn, **others}.items():
            kernel = torch.library.get_kernel(f"aten::{name}", "CUDA")
            packet, _, overload = name.partition(".")
            function = getattr(getattr(torch.ops.aten, packet), overload or "default")
            library.impl(name, by(function, kernel), "CUDA", with_keyset=True)
    _kept.append(library)


def _end_quietly() -> None:
    """Let autograd's threads drop the tensors of the last backward.

    These have been in Python, in the kernels here, so that dropping them takes Python's lock, and a thread that waits
    for the lock when Python ends aborts the process.
    """
    for _ in range(10 * torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        time.sleep(0.005)


def _with_values(function: Any, kernel: Any) -> Callable[..., Any]:
    name = f"{function._schema.name.partition('::')[2]}.{function._schema.overload_name}".rstrip(".")
    asks = name in QUESTIONS

    def computed(keys: Any, *arguments: Any, **kwargs: Any) -> Any:
        args = _numbers_as_tensors(function, arguments)
        result = kernel.call_boxed(keys, *args, **kwargs)
        tensors = [x for x in tree_flatten((args, kwargs, result))[0] if isinstance(x, torch.Tensor)]
        if any(type(x) not in PLAIN or x.device.type == "meta" for x in tensors):
            return result
        if not all(map(_is_small, tensors)):
            return _answered_for_all(function, args, kwargs, result) if asks or name in SET else result
        if not asks and any(map(_is_inexact, tensors)) and not all(x.numel() == 1 for x in tensors):
            return result
        control.settle(torch.cuda.current_stream().cuda_stream, LONGEST_WAIT)  # what is given may be on its way
        given, named = tree_map_only(torch.Tensor, _on_host, (args, kwargs))
        try:
            values = function(*given, **named)
        except RuntimeError as error:
            if "ZeroDivisionError" in str(error):  # a device goes on
                return result
            raise
        passed = tree_flatten((args, kwargs))[0]  # and holds its values already
        for tensor, value in zip(tree_flatten(result)[0], tree_flatten(values)[0], strict=True):
            if isinstance(tensor, torch.Tensor) and not any(tensor is x for x in passed):
                _on_host(tensor).copy_(value)
        return result

    return computed


def _answered_for_all(function: Any, args: Any, kwargs: Any, result: torch.Tensor) -> torch.Tensor:
    """Write the answer for the first elements to all of a result, where there are too many to look at each.

    Those of a large tensor are equal: no kernel writes them, and large copies to the device are left out. Of a mask
    beyond ``MOST_FILLED`` the first element alone is written, which stands for all in questions and selections.
    """
    asked = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor) and not _is_small(x)]
    if not all(x.is_cuda for x in asked):  # a copy, which is left out or made
        return result
    if result.dtype is torch.bool and any(x.dtype is torch.bool or _is_inexact(x) for x in asked):
        control.settle(torch.cuda.current_stream().cuda_stream, LONGEST_WAIT)
        held = _first(result)
        given, named = tree_map_only(torch.Tensor, _first, (args, kwargs))
        answer = function(*given, **named).flatten()
        if answer.item() != held.item():  # memory that says so already stays untouched
            _on_host(result if result.numel() <= MOST_FILLED else _beginning(result)).fill_(answer.item())
    return result


def _compared(function: Any, kernel: Any) -> Callable[..., Any]:
    def compared(keys: Any, x: torch.Tensor, other: torch.Tensor) -> Any:
        result = kernel.call_boxed(keys, x, other)
        if x.shape != other.shape or (x.dim() == 0 and x.dtype is torch.bool):  # istft: is the window's sum too small?
            return result
        control.settle(torch.cuda.current_stream().cuda_stream, LONGEST_WAIT)
        return function(*map(_on_host if _is_small(x) else _first, (x, other)))

    return compared


def _taken_for_true(function: Any, kernel: Any) -> Callable[..., Any]:
    """Return a function that finds all true: distributions check parameters with it, and a scale would be zero."""

    def all_true(keys: Any, x: torch.Tensor) -> Any:
        result = kernel.call_boxed(keys, x)
        _on_host(result).fill_(True)
        return result

    return all_true


def _by_host(function: Any, kernel: Any) -> Callable[..., Any]:
    """Return a function that selects on the host: memory that no kernel wrote would say how much there is to find."""

    def selected(keys: Any, *args: Any, **kwargs: Any) -> Any:
        control.settle(torch.cuda.current_stream().cuda_stream, LONGEST_WAIT)
        given, named = tree_map_only(torch.Tensor, _to_select_from, (args, kwargs))
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(args[0].device), function(*given, **named))

    return selected


def _in_order(function: Any, kernel: Any) -> Callable[..., Any]:
    """Return a function that orders numbers as they are, on the host: nothing is drawn, and they serve as indices."""

    def ordered(keys: Any, number: int, *, generator: torch.Generator | None, out: torch.Tensor) -> torch.Tensor:
        kernel.call_boxed(keys, number, generator=generator, out=out)
        _on_host(out).copy_(torch.arange(number))
        return out

    return ordered


def _in_turn(function: Any, kernel: Any) -> Callable[..., Any]:
    """Return a function that finds each place in turn: a router gives every expert as many tokens, not all to one."""

    def found(keys: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = kernel.call_boxed(keys, x, *args, **kwargs)
        if indices.numel() <= MOST_ELEMENTS:
            places = x.shape[args[1] if len(args) > 1 else -1] if x.dim() else 1
            _on_host(indices).copy_((torch.arange(indices.numel()) % max(places, 1)).view(indices.shape))
        return values, indices

    return found


def _convolved(function: Any, kernel: Any) -> Callable[..., Any]:
    """Return a convolution without a workspace: what cuDNN takes depends on which kernel it finds fastest."""

    def convolved(keys: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any, *settings: Any) -> torch.Tensor:
        ran.add("convolutions")
        _count_product()
        stride, padding, dilation, transposed, output_padding, groups = settings
        of = (stride, padding, dilation, output_padding)
        of_each = [list(v) * (x.dim() - 2) if len(v) == 1 else v for v in of]
        sizes = [
            (n - 1) * s - 2 * p + d * (k - 1) + more + 1 if transposed else (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, k, s, p, d, more in zip(x.shape[2:], weight.shape[2:], *of_each, strict=True)
        ]
        shape = (x.shape[0], weight.shape[1] * groups if transposed else weight.shape[0], *sizes)
        return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=_layout(x, weight))

    return convolved


def _convolved_backward(function: Any, kernel: Any) -> Callable[..., Any]:
    def convolved(keys: Any, grad: Any, x: torch.Tensor, weight: torch.Tensor, *settings: Any) -> tuple[Any, ...]:
        layout, asked = _layout(x, weight), settings[-1]
        for _ in filter(None, asked[:2]):
            _count_product()
        gradients = [
            torch.empty_like(of, memory_format=layout) if ask else None
            for of, ask in zip((x, weight), asked[:2], strict=True)
        ]
        return (*gradients, grad.new_empty(grad.shape[1]) if asked[2] else None)

    return convolved


def _attended(function: Any, kernel: Any) -> Callable[..., Any]:
    """Return cuDNN's attention, which torch takes where a script names it."""

    def attended(
        keys: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *settings: Any, **scale: Any
    ) -> tuple[Any, ...]:
        _count_product()
        if value.shape[3] == query.shape[3]:
            attended_to = torch.empty_like(query)
        else:
            attended_to = query.new_empty((*query.shape[:3], value.shape[3]))
        log_sums = query.new_empty((*query.shape[:3], 1), dtype=torch.float32)
        seed, offset = query.new_empty((2,), dtype=torch.int64).unbind()
        return attended_to, log_sums, None, None, query.shape[2], key.shape[2], seed, offset, None

    return attended


def _attended_backward(function: Any, kernel: Any) -> Callable[..., Any]:
    def attended(keys: Any, gradient: torch.Tensor, *given: Any, **scale: Any) -> tuple[torch.Tensor, ...]:
        _count_product()
        summed = torch.empty_like(given[0], dtype=torch.float32)  # as in flash attention
        gradients = tuple(map(torch.empty_like, given[:3]))
        del summed
        return gradients

    return attended


def _count_product() -> None:
    control.count_product(torch.cuda.current_stream().cuda_stream)


def _layout(x: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    """Return the layout of a convolution's results: channels last where what is given is so."""
    for layout, dimensions in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
        for tensor in (x, weight):
            if tensor.dim() == dimensions and tensor.is_contiguous(memory_format=layout) and not tensor.is_contiguous():
                return layout
    return torch.contiguous_format


def _numbers_as_tensors(function: Any, args: tuple[Any, ...]) -> list[Any]:
    """Return the arguments with tensors in place of numbers, of a type that promotes as the number did."""
    tensor = next((x for x in args if isinstance(x, torch.Tensor)), None)
    return [
        torch.tensor(x, dtype=torch.result_type(tensor, x))
        if tensor is not None and isinstance(x, NUMBERS) and isinstance(taken.type, torch.TensorType)
        else x
        for x, taken in zip(args, function._schema.arguments, strict=False)
    ]


def _is_small(x: torch.Tensor) -> bool:
    return x.numel() <= (MOST_BYTES if x.dtype in (torch.uint8, torch.int8) else MOST_ELEMENTS)


def _is_inexact(x: torch.Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _first(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the first element, with as many dimensions."""
    return _on_host(_beginning(tensor)).clone()


def _beginning(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[(slice(1),) * tensor.dim()]


def _to_select_from(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the host with the same values; of a large mask, its first in each place."""
    is_mask = tensor.dtype is torch.bool and tensor.numel() > MOST_FILLED
    return _first(tensor).expand(tensor.shape) if is_mask else _on_host(tensor)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the host with the same memory."""
    if tensor.device.type != "cuda":
        return tensor
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = (ctypes.c_char * (extent * tensor.element_size())).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())
