"""Time that several ranks add to a step: to be ready for one that runs out of memory, and to share out samples.

    pip install -e .[torchtune]
    python benchmarks/distributed_overhead.py                                  # about 4 minutes on 2 cores
    python benchmarks/distributed_overhead.py --device cuda --ranks 1

Two runs of ``full_finetune_distributed`` on the quickstart's data, with recovery armed and off, take turns step by step
within the same processes, as in ``overhead.py``. Afterwards one rank runs out of memory once, for the number of steps
that run again, and another run shares out its steps. The last line printed is a JSON object: the ratio of armed to off,
that number, and the share of a step in which it is shared out: lengths gathered, and samples assigned and sent, with a
wait for the other rank.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import write_report
from overhead import ONE_HEAP, WARM_UP_STEPS, TakingTurns, check_equal, median_and_interval, run_all

ROOT = Path(__file__).parent.parent
OFF, ARMED = 0, 1
BATCH_SIZE, SHARED_BATCH_SIZE = 2, 8
LIMIT = {"memory_limit": "4GiB"}


def measure(inputs: str, directory: str, device: str, samples: int, first: int) -> dict[str, Any]:
    """Train both ways in turns, and once with an error, on this rank."""
    sys.path.insert(0, str(ROOT))
    import torch
    from omegaconf import OmegaConf

    from adaptive_batching._report.events import Watcher
    from adaptive_batching._step.sharing import Sharing
    from adaptive_batching.torchtune import load_stock
    from recipes import full_finetune_distributed as ours

    stock: Any = load_stock("full_finetune_distributed")

    def make(name: str, *, recover: bool = True, **fields: Any) -> Any:
        cfg: Any = OmegaConf.load(ROOT / "recipes/configs/quickstart/full_single_device.yaml")
        cfg.update(
            data_dir=inputs, output_dir=f"{directory}/{name}", device=device, batch_size=BATCH_SIZE, epochs=1,
            use_maximum_batch_size=False, batch_increase_function=None, micro_batch_size=BATCH_SIZE,
            adaptive_batching={"recover_from_oom": recover},
        )  # fmt: skip
        cfg = OmegaConf.merge(cfg, fields)
        cfg.dataset.split = f"train[:{samples}]"
        made: Any = ours.FullFinetuneRecipeDistributed(cfg=cfg)
        made.setup(cfg)
        stock.init_process_group = lambda backend: None  # the next recipe joins the same
        made.save_checkpoint = lambda epoch: None
        return made

    turns = TakingTurns(first)
    threads = []
    for number, recover in ((OFF, False), (ARMED, True)):
        recipe = make(f"{number}", recover=recover)
        recipe.watchers.append(turns.watcher(number))
        threads.append(threading.Thread(target=turns.train, args=(number, recipe)))
    run_all(threads)

    recipe = make("recovers")
    left = [1 if recipe.ranks.rank == recipe.ranks.size - 1 else 0]

    def run_out(module: Any, args: Any) -> None:
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("injected")

    list(recipe._model.layers)[-1].register_forward_pre_hook(run_out)
    again: list[int] = []

    class Counts(Watcher):
        def step(self, epoch: int, step: int, samples: int, loss: float, lr: float, recoveries: int = 0) -> None:
            again.append(recoveries)

    recipe.watchers.append(Counts())
    recipe.train()

    shares = make("shares", batch_size=SHARED_BATCH_SIZE, micro_batch_size="auto", adaptive_batching=LIMIT)
    took, ends = list[float](), list[float]()
    parts_of = Sharing.parts

    def timed(*arguments: Any, **named: Any) -> Any:
        start = time.perf_counter()
        parts = parts_of(*arguments, **named)
        took.append(time.perf_counter() - start)
        return parts

    class Ends(Watcher):
        def step(self, epoch: int, step: int, samples: int, loss: float, lr: float, recoveries: int = 0) -> None:
            ends.append(time.perf_counter())

    Sharing.parts = timed  # type: ignore[method-assign]
    shares.watchers.append(Ends())
    shares.train()
    sharing = np.median(took[WARM_UP_STEPS:]) / np.median(np.diff(ends)[WARM_UP_STEPS:]) if took else 0.0
    is_first = recipe.ranks.is_first
    recipe.ranks.leave()
    recipe.cleanup()
    found = {"losses": turns.losses, "seconds": turns.seconds, "again": again[-1], "sharing": float(sharing)}
    if is_first:
        Path(directory, "found.json").write_text(json.dumps(found))
    return found


def main() -> None:
    """Launch the ranks, some times, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--samples", type=int, default=480)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/distributed_overhead_<device>.md")
    parser.add_argument("--measure", nargs=3, metavar=("INPUTS", "DIRECTORY", "FIRST"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        inputs, directory, first = args.measure
        measure(inputs, directory, args.device, args.samples, int(first))
        return

    from adaptive_batching._torchtune.cli.quickstart import build

    pairs: list[float] = []
    seconds: list[list[float]] = [[], []]
    again, sharing = 0, list[float]()
    with tempfile.TemporaryDirectory() as directory:
        inputs = f"{directory}/inputs"
        build(Path(inputs))
        for repeat in range(args.repeats):
            out = Path(directory, f"out_{repeat}")
            out.mkdir()
            launch = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc_per_node",
                str(args.ranks),
            ]
            options = ["--device", args.device, "--samples", str(args.samples)]
            done = subprocess.run(
                [*launch, __file__, *options, "--measure", inputs, str(out), str(repeat % 2)],
                env={**os.environ, "OMP_NUM_THREADS": "1", **ONE_HEAP}, capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode:
                sys.exit(done.stderr[-4000:])
            found = json.loads((out / "found.json").read_text())
            check_equal(found["losses"][ARMED], found["losses"][OFF])
            off, armed = (np.array(each[WARM_UP_STEPS:]) for each in found["seconds"])
            pairs += (armed / off).tolist()
            for total, each in zip(seconds, (off, armed), strict=True):
                total += each.tolist()
            again = max(again, found["again"])
            sharing.append(found["sharing"])
            print(
                f"armed / off {np.median(armed / off):.4f}, ran again {found['again']}, shared out in "
                f"{found['sharing']:.2%} of a step", flush=True
            )  # fmt: skip
    ratio, low, high = median_and_interval(pairs)
    write_report(
        f"Recovery armed against off, and steps shared out, {args.ranks} ranks",
        device=args.device,
        facts=[
            f"{len(pairs)} pairs of steps of {BATCH_SIZE} samples on each rank; medians, in brackets 95 % of them",
            "the losses of all runs are equal bit for bit",
            f"one rank ran out of memory once: {again} step ran again",
            f"a step of {SHARED_BATCH_SIZE} samples on each rank is shared out in {np.median(sharing):.1%} of its time",
        ],
        rows=[
            "| recovery | seconds per step |",
            "|---|---|",
            f"| off | {np.median(seconds[OFF]):.4f} |",
            f"| armed | {np.median(seconds[ARMED]):.4f} |",
            f"| armed / off | {ratio:.4f} ({low:.4f} to {high:.4f}) |",
        ],
        figures={
            "armed_step_ratio": round(ratio, 4),
            "recovery_extra_steps": again,
            "sharing_share_of_step": round(float(np.median(sharing)), 4),
        },
        output=args.output,
    )


if __name__ == "__main__":
    main()
