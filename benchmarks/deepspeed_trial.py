"""One trial of DeepSpeed's autotuner, which starts this script for ``probe_vs_peers.py`` and reads what it writes.

The script trains until DeepSpeed has measured enough and ends the process, or until a step fails. As in the other
methods, two warm-up steps at batch size 1 come first, then the memory limit; a step that is counted comes after.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import deepspeed
from probe_vs_peers import WORKLOADS, Task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(WORKLOADS), required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--local_rank", type=int, help="given by DeepSpeed")
    args = deepspeed.add_config_arguments(parser).parse_args()

    task = Task(args.model, args.device)
    engine, *_ = deepspeed.initialize(args=args, model=task.model, optimizer=task.optimizer)

    def step(batch_size: int) -> None:
        with task.failures_counted():
            engine.backward(task.loss(engine, task.batch(batch_size)))
            engine.step()

    for _ in range(2):
        step(1)
    task.num_steps = 0
    task.set_limit()
    try:
        while True:
            step(engine.train_micro_batch_size_per_gpu())
    finally:
        with Path("counts.jsonl").open("a") as file:
            file.write(json.dumps({"steps": task.num_steps, "ooms": task.num_out_of_memory}) + "\n")


if __name__ == "__main__":
    main()
