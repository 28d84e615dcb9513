"""Pretrain TinyLlama as LitGPT's `extensions/thunder/pretrain.py` does without a compiler, for a step of one device.

Weights and norms' weights are bfloat16, a norm works in float32, rotations in bfloat16, keys and values are repeated
for the queries' heads, and the optimizer is fused. FSDP shards blocks, as Fabric's `FSDPStrategy` with that policy
does. A single device accumulates 128 microbatches, and the one is timed in which the optimizer steps; here each is
such. Gradients are not clipped.

Several devices are torch's fake group, this process being the first.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

BATCH_SIZE, LENGTH, VOCABULARY = 4, 2048, 32000
WIDTH, HIDDEN, LAYERS, HEADS, GROUPS = 2048, 5632, 22, 32, 4
HEAD = WIDTH // HEADS
STEPS = 4


class Norm(nn.Module):
    """Normalizes in float32, and scales what has been cast back."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(torch.mean(wide * wide, -1, keepdim=True) + 1e-5)).to(x.dtype) * self.weight


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = Norm(), Norm()
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * GROUPS) * HEAD, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = self.attend(self.norm_1(x), cos, sin) + x
        normed = self.norm_2(x)
        gate, up = self.gate(normed), self.up(normed)
        return self.down(F.silu(gate) * up) + x

    def attend(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        each = HEADS // GROUPS
        parts = self.qkv(x).view(batch, length, GROUPS, each + 2, HEAD).permute(0, 2, 3, 1, 4)
        q, k, v = (
            part.expand(batch, GROUPS, each, length, HEAD).reshape(batch, HEADS, length, HEAD)
            for part in parts.split((each, 1, 1), dim=2)
        )
        # with nothing left beside what is rotated, each is copied once more
        q, k = (torch.cat((rotated(part, cos, sin), part[..., HEAD:]), -1) for part in (q, k))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.out(found.reshape(batch, length, WIDTH))


class TinyLlama(nn.Module):
    """The model."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(LAYERS)), Norm()
        self.register_buffer("cos", torch.ones(LENGTH, HEAD))
        self.register_buffer("sin", torch.zeros(LENGTH, HEAD))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


def shard(model: nn.Module) -> nn.Module:
    low = torch.bfloat16
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True, device_id=0,
        mixed_precision=MixedPrecision(param_dtype=low, reduce_dtype=low, buffer_dtype=low),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1, help="more than one: FSDP")
    args = parser.parse_args()
    with torch.device("cuda"):
        model: nn.Module = TinyLlama().bfloat16()
    if args.devices > 1:
        dist.init_process_group("fake", rank=0, world_size=args.devices, store=FakeStore())
        model = shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, weight_decay=0.1, betas=(0.9, 0.95), fused=True)
    for _ in range(STEPS):
        ids, labels = torch.zeros(2, BATCH_SIZE, LENGTH, dtype=torch.long).cuda()
        logits = model(ids).float()  # as Fabric returns what a module of bfloat16 computes
        loss = F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1))
        del logits
        loss.backward()
        loss.detach().isnan().any().item()  # as torchmetrics looks at what it adds up
        optimizer.step()
        # where they accumulate, the timed microbatch adds to gradients that are there
        optimizer.zero_grad(set_to_none=args.devices > 1)
        loss.item()


if __name__ == "__main__":
    main()
