"""Runs under torchtune's flex attention, on the cpu.

    python tests/integration/flex_attention.py '[["run", <recipe>, "--config", <config>, ...], ...]'

torchtune takes flex attention where a CUDA device is there, so its modules are imported in the belief that one is.
Masks are made on the cpu. The cpu has no flex attention that trains: a dense one, compiled for each size as well,
stands in its place. The last line printed is a JSON list: what was compiled in each training.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch

compiled = 0


def count(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    global compiled
    compiled += 1
    return graph.forward


def prepare() -> None:
    """Import torchtune as where there is a CUDA device."""
    import torchao  # noqa: F401 (a CUDA build of torch looks at the device when it is imported)

    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)),
    ):
        from torchtune.utils import _import_guard

        assert _import_guard._SUPPORTS_FLEX_ATTENTION
    import torchtune.data._collate as collate
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask
    from torch.nn.functional import scaled_dot_product_attention
    from torchtune.modules import attention_utils

    def mask_on_cpu(seq_lens: list[torch.Tensor]) -> BlockMask:
        documents = attention_utils._get_document_ids_from_seq_lens(seq_lens)  # [b, s]

        def sees(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            return (q >= kv) & (documents[b, q] == documents[b, kv])

        (batch_size, length) = documents.shape
        return create_block_mask(sees, batch_size, None, length, length, device="cpu")

    collate.packed_block_causal_mask = mask_on_cpu

    @partial(torch.compile, dynamic=False, backend=count)
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def instead_of_flex_attention(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_mask: BlockMask
    ) -> torch.Tensor:
        batch_size, _, length, _ = q.shape  # [b, heads, s, d]
        mask = create_mask(block_mask.mask_mod, batch_size, None, length, length, device="cpu")
        return attention(q, k, v, mask)

    attention_utils.compile_friendly_flex_attention = instead_of_flex_attention
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # instead of building the whole matrix of scores


def main() -> None:
    prepare()
    from torchtune._cli.tune import main as tune

    from adaptive_batching._step.forward_times import ForwardTimes
    from adaptive_batching._torchtune.train.run import TrainingLoop

    # How large a forward has to be depends on the speed of the machine: this is to see what fits.
    ForwardTimes.enough = lambda self: None  # type: ignore[method-assign]
    run, in_training = TrainingLoop.run, []

    def count_compiled(loop: TrainingLoop) -> None:
        before = compiled
        run(loop)
        in_training.append(compiled - before)

    TrainingLoop.run = count_compiled  # type: ignore[assignment, method-assign]
    runs = json.loads(sys.argv[1])
    for arguments in runs:
        torch._dynamo.reset()
        sys.argv = ["tune", *arguments]
        try:
            tune()
        except SystemExit as end:
            if end.code:
                raise
    print(json.dumps(in_training))


if __name__ == "__main__":
    main()
