"""What a call of a torch operation asks of a device, by its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from adaptive_batching._dry_run.time.operations import flops_of, operation

ATEN = torch.ops.aten


def asked(func: Any, *args: Any) -> Any:
    out = func(*args)
    read, written = ([x for x in some if isinstance(x, torch.Tensor)] for some in (args, [out]))
    return operation(func, args, {}, out, read, written, 1, "model.py:1")


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_attention_takes_two_products_and_its_backward_five_of_all_heads(kv_heads: int) -> None:
    query, key, value = (torch.randn(2, heads, 64, 16, requires_grad=True) for heads in (8, kv_heads, kv_heads))
    of_a_product = 2 * 2 * 8 * 64 * 64 * 16
    forward, backward = ATEN._scaled_dot_product_flash_attention, ATEN._scaled_dot_product_flash_attention_backward
    assert flops_of(forward.default, (query, key, value), {}, None) == 2 * of_a_product
    assert flops_of(backward.default, (query, query, key, value), {}, None) == 5 * of_a_product
    if kv_heads == 8:
        assert flop_registry[forward](query, key, value, out_val=None) == 2 * of_a_product, "torch counts the same"
        assert flop_registry[backward](query, query, key, value, out_val=None) == 5 * of_a_product


@pytest.mark.parametrize(
    ("dtype", "columns", "is_aligned"),
    [
        (torch.bfloat16, 512, True),
        (torch.bfloat16, 515, False),
        (torch.float16, 515, False),
        (torch.float32, 515, True),
    ],
)
def test_rows_of_a_product_begin_at_multiples_of_16_bytes_or_not(
    dtype: torch.dtype, columns: int, is_aligned: bool
) -> None:
    left, right = torch.ones(24, 64, dtype=dtype), torch.ones(64, columns, dtype=dtype)
    assert asked(ATEN.mm.default, left, right).is_aligned == is_aligned
    assert asked(ATEN.mm.default, torch.ones(columns, 64, dtype=dtype), left.mT).is_aligned, "of aligned rows only"


@pytest.fixture
def precisions() -> Iterator[Any]:
    """Settings of torch for float32, which are as before afterwards."""
    kinds: tuple[Any, Any] = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)  # type: ignore[attr-defined]
    before = [kind.fp32_precision for kind in kinds]
    yield kinds
    for kind, precision in zip(kinds, before, strict=True):
        kind.fp32_precision = precision


def test_products_of_float32_are_in_tf32_where_either_of_torchs_settings_asks_for_it(precisions: Any) -> None:
    matmul, conv = precisions
    for precision, dtype in (("tf32", "tf32"), ("ieee", "float32")):
        matmul.fp32_precision = precision
        assert asked(ATEN.mm.default, torch.ones(8, 8), torch.ones(8, 8)).dtype == dtype
    matmul.allow_tf32 = True  # the older one
    assert asked(ATEN.mm.default, torch.ones(8, 8), torch.ones(8, 8)).dtype == "tf32"
    images, weight = torch.ones(1, 2, 5, 5), torch.ones(2, 2, 3, 3)
    rest = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    assert asked(ATEN.convolution.default, images, weight, *rest).dtype == "tf32", "as cuDNN does unless told otherwise"
    conv.fp32_precision = "ieee"
    assert asked(ATEN.convolution.default, images, weight, *rest).dtype == "float32"


def test_what_is_normalized_by_the_batch_is_read_twice() -> None:
    images, scale = torch.ones(4, 8, 5, 5), torch.ones(8)
    out = torch.native_batch_norm(images, scale, scale, None, None, True, 0.1, 1e-5)
    one = operation(ATEN.native_batch_norm.default, (images,), {}, out, [images, scale], list(out), 1, "")
    assert one.bytes == 3 * images.nbytes
