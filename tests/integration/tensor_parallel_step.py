"""Real steps of a rank under tensor parallelism; prints the most bytes that one has in use beyond those at rest.

torchrun --nproc_per_node 2 -m tests.integration.tensor_parallel_step <inputs> <directory> <override> ...
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist

from adaptive_batching._torchtune.training_step import training_step
from recipes import full_finetune_distributed as recipes
from tests.torchtune.test_on_paper import LENGTH, config, transient_bytes


def main(inputs: str, directory: str, *overrides: str) -> None:
    cfg = config("full", *overrides, inputs=Path(inputs), out=Path(directory))
    made = recipes.FullFinetuneRecipeDistributed(cfg)
    made.setup(cfg)
    assert made._session is not None
    host = made._session.host
    step = training_step(host, {"tokens": [1] * LENGTH, "labels": [1] * LENGTH}, accumulates=False)
    # The threads of gloo hold a tensor for as long as they happen to need it, which can only add to what a step takes.
    taken = min(transient_bytes(step) for _ in range(8))
    if dist.get_rank() == 0:
        print(f"transient bytes: {taken}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
