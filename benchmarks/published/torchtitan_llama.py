"""Pretrain Llama 3 as torchtitan's benchmarks of 2024 and torchao's with it do, for the peak or the time of one rank.

The model, its checkpointing and FSDP2 are torchtitan's; steps are those of its `train.py`. Without more options it is
Llama 3.1 8B with batch and checkpointing of `llama3_8b.toml`, as of December 2024. The group is torch's fake one, of
any number of ranks, this process being the first: collectives take the memory that they take, and nothing is sent.

Two things are as they were then. In torch before 2.8 (pull request 154704), what FSDP2 has not sharded by layers stays
gathered between forward and backward: embeddings, last norm and output. And torchtitan had a norm of its own.
"""

from __future__ import annotations

import argparse
import os
from unittest import mock

os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # as torchtitan's script for a start sets it

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.config_manager import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama3 import Transformer, llama3_configs, parallelize_llama


class RMSNorm(torch.nn.Module):
    """Normalizes in float32, and scales what has been cast back: torchtitan's norm until it took torch's, now fused."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(dim))
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + self._eps)).type_as(x) * self.weight

    def reset_parameters(self) -> None:
        torch.nn.init.ones_(self.weight)


VOCABULARY = 128256
STEPS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--size", choices=("8B", "70B"), default="8B")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument(
        "--checkpoint", choices=("none", "op", "2", "full"), default="op",
        help="of activations: what some operators compute, every second layer, or all layers",
    )  # fmt: skip
    parser.add_argument("--root-reshards", action="store_true", help="as torch does since 2.8")
    parser.add_argument("--todays-norm", action="store_true", help="torch.nn.RMSNorm, as torchtitan does now")
    args = parser.parse_args()
    dist.init_process_group("fake", rank=0, world_size=args.devices, store=FakeStore())
    torch.cuda.set_device(0)
    config = JobConfig()
    selective = args.checkpoint in ("op", "2")
    config.activation_checkpoint.mode = "selective" if selective else args.checkpoint
    config.activation_checkpoint.selective_ac_option = args.checkpoint
    config.training.compile = args.compile
    parallel = ParallelDims(1, args.devices, 1, 1, 1, args.devices, enable_loss_parallel=True)
    of_model = llama3_configs[args.size]
    of_model.vocab_size, of_model.max_seq_len = VOCABULARY, args.length
    norm = torch.nn.RMSNorm if args.todays_norm else RMSNorm
    with torch.device("meta"), mock.patch("torch.nn.RMSNorm", norm):
        model = Transformer(of_model)
    parallelize_llama(model, parallel.build_mesh("cuda"), parallel, config)
    model.set_reshard_after_forward(args.root_reshards, recurse=False)
    model.to_empty(device="cuda")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)
    for _ in range(STEPS):
        tokens = torch.zeros(args.batch_size, args.length, dtype=torch.long).cuda()
        labels = torch.zeros(args.batch_size, args.length, dtype=torch.long).cuda()
        optimizer.zero_grad()
        found = model(tokens)
        loss = F.cross_entropy(found.flatten(0, 1).float(), labels.flatten(0, 1))
        del found
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()


if __name__ == "__main__":
    main()
