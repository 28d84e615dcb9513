"""Pretrain MPT as llm-foundry's benchmark does (`scripts/train/benchmarking` of mosaicml/llm-foundry), on one rank.

Sizes are those of its configs, whose blocks have biases, a fused projection of queries, keys and values, and a norm in
low precision; parameters come to the number in its table. Composer's FSDP shards blocks, fetches the next block's
weights after the backward pass of one, reduces gradients of each microbatch in float32 (`DEFAULT`) or bfloat16
(`PURE`), and counts cross entropy twice more for its metrics; its optimizer takes parameters one by one. Two things
stand in: torch's flash attention for Triton's, and a compiled loss for flash-attn's.

The group is torch's fake one, of any number of ranks, this process being the first.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

VOCABULARY, STEPS = 50368, 4
SIZES = {  # width, heads, layers
    "125m": (768, 12, 12), "350m": (1024, 16, 24), "760m": (1536, 12, 24), "1b": (2048, 16, 24), "3b": (2560, 20, 32),
    "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 56, 48), "70b": (8192, 64, 80),
}  # fmt: skip


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(normed(self.norm_1, x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(found)
        return x + self.down(F.gelu(self.up(normed(self.norm_2, x))))


class Mpt(nn.Module):
    """The model, whose output layer is the embedding's."""

    def __init__(self, width: int, heads: int, layers: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(normed(self.norm, x), self.tokens.weight)


def normed(norm: nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
    """Normalize in the type of `x`; autocast would take float32."""
    with torch.autocast("cuda", enabled=False):
        return norm(x)


@torch.compile
def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def empty(module: nn.Module) -> None:
    module.to_empty(device="cuda", recurse=False)


def shard(model: Mpt, *, reduce_in: torch.dtype, checkpoint: bool) -> FullyShardedDataParallel:
    low = torch.bfloat16
    sharded = FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True, device_id=0, limit_all_gathers=True,
        mixed_precision=MixedPrecision(param_dtype=low, reduce_dtype=reduce_in, buffer_dtype=low),
        backward_prefetch=BackwardPrefetch.BACKWARD_POST,
        param_init_fn=empty,
    )  # fmt: skip
    if checkpoint:
        apply_activation_checkpointing(
            sharded, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=lambda module: isinstance(module, Block)
        )
    return sharded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--microbatch", type=int, required=True)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--checkpoint", action="store_true", help="activation checkpointing")
    parser.add_argument("--pure", action="store_true", help="reduce gradients in bfloat16")
    args = parser.parse_args()
    dist.init_process_group("fake", rank=0, world_size=args.devices, store=FakeStore())
    torch.cuda.set_device(0)
    with torch.device("meta"):
        whole = Mpt(*SIZES[args.size], args.length)
    model = shard(whole, reduce_in=torch.bfloat16 if args.pure else torch.float32, checkpoint=args.checkpoint)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0, foreach=False)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(args.accumulate):
            ids, labels = torch.zeros(2, args.microbatch, args.length, dtype=torch.long).cuda()
            with torch.autocast("cuda", torch.bfloat16):
                logits = model(ids)
                loss = loss_of(logits, labels)
            (loss / args.accumulate).backward()
            with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
                for _ in range(2):
                    F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            del logits
        model.clip_grad_norm_(1.0)
        optimizer.step()
        loss.item()


if __name__ == "__main__":
    main()
