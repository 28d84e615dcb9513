"""What our recipe costs with recovery alone, against torchtune's stock recipe: per optimizer step and per process.

    pip install -e .[torchtune]
    python benchmarks/overhead.py                    # about 5 minutes on 2 cores
    python benchmarks/overhead.py --device cuda

Both fine-tune the quickstart's model on its data for one epoch, from one config, to which ours adds recovery. The
losses of all runs must be equal bit for bit; if they are not, there is no result.

*Per step.* A machine's speed changes from second to second by more than what is asked for here, so both recipes train
in one process, each in a thread of its own, and take turns: a step of one, then the same step of the other. On the host
torch has one thread, so that no recipe has its workers on the better cores. A pair of steps gives a ratio; the result
is the median over pairs, and its interval is where 95 % of medians lie when pairs are drawn anew, with replacement. The
recipe that goes first changes from process to process.

*Per process.* ``tune run`` in fresh processes, in turn, from start to exit.

*The audit.* A run in micro-batches looks every fourth step if the gradient of two parts is that of their union; the
seconds of a look and of a step say what three looks, as by default, cost in a run of 200 steps.

The last line printed is a JSON object: the ratio per step, and that of 200 steps with their audits to 200 without.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import Recipe, measure_in_fresh_process, write_report

# Our package is imported where it is used: stock's process must not pay for it.

ROOT = Path(__file__).parent.parent
STOCK, OURS = "stock", "ours, recovery alone"
RECIPES = {STOCK: "full_finetune_single_device", OURS: "recipes/full_finetune_single_device.py"}
AUDITED = {"batch_size": 32, "micro_batch_size": 8}
AUDITED_STEPS = 24
BATCH_SIZE = 2  # steps of a tenth of a second or less: what one costs beside its arithmetic can show
WARM_UP_STEPS = 5
RESAMPLES = 2000
# The threads that take turns would have heaps of their own, of which one was slower by a half.
ONE_HEAP = {"MALLOC_ARENA_MAX": "1"}


class TakingTurns:
    """Recipes, of which one trains at a time: a step each, in their order. One calls :meth:`step_done` after each step.

    Args:
        first: Number of the recipe that begins.
        recipes: Number of recipes.
    """

    def __init__(self, first: int, recipes: int = 2) -> None:
        self.losses: list[list[float]] = [[] for _ in range(recipes)]
        self.seconds: list[list[float]] = [[] for _ in range(recipes)]
        self._turns = [threading.Semaphore(0) for _ in range(recipes)]
        self._turns[first].release()
        self._done = [False] * recipes
        self._started = 0.0

    def train(self, number: int, recipe: Recipe) -> None:
        """Train, in a thread of its own."""
        self._wait(number)
        recipe.train()
        self._done[number] = True
        self._turns[self._next(number)].release()

    def step_done(self, number: int, loss: Any) -> None:
        """Recipe ``number`` has taken a step; the next one's turn."""
        self.losses[number].append(float(loss))  # waits for the device
        self.seconds[number].append(time.perf_counter() - self._started)
        self._turns[self._next(number)].release()
        self._wait(number)

    def _next(self, number: int) -> int:
        """Return the number of the recipe whose turn is after ``number``'s; that itself if all others are done."""
        others = [(number + later) % len(self._done) for later in range(1, len(self._done))]
        return next((other for other in others if not self._done[other]), number)

    def watcher(self, number: int) -> Any:
        """Return what tells this of the steps of recipe ``number``, if it is ours."""
        from adaptive_batching._report.events import Watcher

        turns = self

        class Turn(Watcher):
            def step(self, epoch: int, step: int, samples: int, loss: float, lr: float, recoveries: int = 0) -> None:
                turns.step_done(number, loss)

        return Turn()

    def _wait(self, number: int) -> None:
        self._turns[number].acquire()
        self._started = time.perf_counter()


def measure_steps(config: str, first: str, output_dir: str) -> dict[str, Any]:
    """Train with both recipes in this process, in turns."""
    from omegaconf import OmegaConf

    from adaptive_batching.torchtune import AdaptiveBatching, load_stock

    stock = load_stock(RECIPES[STOCK])

    class Ours(AdaptiveBatching, stock.FullFinetuneRecipeSingleDevice):  # type: ignore[misc, name-defined]
        """The recipe of the same name."""

    turns = TakingTurns(first=int(first))
    threads = []
    for number, recipe_class in enumerate((stock.FullFinetuneRecipeSingleDevice, Ours)):
        cfg: Any = OmegaConf.load(config)
        cfg.output_dir = f"{output_dir}/{number}"
        if recipe_class is Ours:
            cfg.adaptive_batching = {"recover_from_oom": True}
        recipe = recipe_class(cfg)
        recipe.setup(cfg)
        recipe._metric_logger.log_dict = lambda payload, step, number=number: turns.step_done(number, payload["loss"])
        threads.append(threading.Thread(target=turns.train, args=(number, recipe)))
    run_all(threads)
    return {"losses": turns.losses, "seconds": turns.seconds}


def run_all(threads: list[threading.Thread]) -> None:
    """Start the threads and wait for them."""
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure_process(recipe: str, config: str, output_dir: str) -> dict[str, Any]:
    """Do in this process what ``tune run`` does."""
    sys.path.insert(0, str(ROOT))  # our recipes/ before the folder that torchtune installs under the same name
    from torchtune._cli.tune import main as tune
    from torchtune.training.metric_logging import DiskLogger

    losses: list[float] = []
    DiskLogger.log_dict = lambda self, payload, step: losses.append(float(payload["loss"]))
    fields = ["adaptive_batching.recover_from_oom=True"] if recipe == RECIPES[OURS] else []
    sys.argv = ["tune", "run", recipe, "--config", config, f"output_dir={output_dir}", *fields]
    try:
        tune()
    except SystemExit as end:  # a recipe ends with sys.exit(None)
        if end.code:
            raise
    return {"losses": losses}


def measure_audit(config: str, output_dir: str) -> dict[str, Any]:
    """Train in micro-batches in this process, and return the seconds of each step and each audit."""
    from omegaconf import OmegaConf

    from adaptive_batching._step.judge import Audit
    from adaptive_batching.torchtune import AdaptiveBatching, load_stock

    class Ours(AdaptiveBatching, load_stock(RECIPES[STOCK]).FullFinetuneRecipeSingleDevice):  # type: ignore[misc, name-defined]
        """The recipe of the same name."""

    cfg: Any = OmegaConf.load(config)
    cfg.update(
        output_dir=output_dir, max_steps_per_epoch=AUDITED_STEPS, adaptive_batching={"audit_every": 4}, **AUDITED
    )
    cfg.dataset.split = "train"
    recipe = Ours(cfg)
    recipe.setup(cfg)
    audits: list[float] = []
    ends: list[float] = []
    recipe._metric_logger.log_dict = lambda payload, step: ends.append(time.perf_counter())
    compare = Audit.compare

    def timed(self: Any, *args: Any) -> bool:
        start = time.perf_counter()
        known = compare(self, *args)
        audits.append(time.perf_counter() - start)
        return known

    Audit.compare = timed  # type: ignore[method-assign, assignment]
    recipe.train()
    return {"audits": audits, "steps": np.diff(ends).tolist()}


def write_config(directory: Path, device: str, samples: int) -> Path:
    """The quickstart's config for one epoch over ``samples``, without our fields."""
    from omegaconf import OmegaConf

    from adaptive_batching._torchtune.train.settings import FIELDS

    cfg: Any = OmegaConf.load(ROOT / "recipes/configs/quickstart/full_single_device.yaml")
    for field in FIELDS:
        cfg.pop(field, None)
    cfg.update(data_dir=str(directory / "inputs"), device=device, batch_size=BATCH_SIZE, epochs=1)
    cfg.dataset.split = f"train[:{samples}]"
    if device == "cuda":
        cfg.cudnn_deterministic_mode = True  # without it not even two runs of stock are equal
    path = directory / "config.yaml"
    OmegaConf.save(cfg, path)
    return path


def median_and_interval(values: list[float]) -> tuple[float, float, float]:
    """The median, and where 95 % of medians lie when the values are drawn anew, with replacement."""
    random = np.random.default_rng(0)
    medians = [np.median(random.choice(values, len(values))) for _ in range(RESAMPLES)]
    low, high = np.quantile(medians, [0.025, 0.975])
    return float(np.median(values)), float(low), float(high)


def check_equal(losses: list[float], reference: list[float]) -> None:
    """Exit where a run did not train as the first one did."""
    if losses != reference:
        sys.exit(f"the losses differ: {losses} and {reference}")


def main() -> None:
    """Measure steps and processes, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--samples", type=int, default=320)
    parser.add_argument("--repeats", type=int, default=4, help="processes of each kind")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/overhead_<device>.md")
    parser.add_argument("--measure", nargs=4, metavar=("WHAT", "CONFIG", "WHICH", "OUTPUT_DIR"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        what, config, which, output_dir = args.measure
        measured = (
            measure_steps(config, which, output_dir)
            if what == "steps"
            else measure_audit(config, output_dir)
            if what == "audit"
            else measure_process(which, config, output_dir)
        )
        print(json.dumps(measured))
        return
    steps = args.samples // BATCH_SIZE
    if steps <= WARM_UP_STEPS or args.repeats < 1:
        parser.error(f"needs --samples > {WARM_UP_STEPS * BATCH_SIZE} and --repeats > 0")

    from adaptive_batching._torchtune.cli.quickstart import build

    pairs: list[float] = []
    step_seconds: list[list[float]] = [[], []]
    process_seconds: dict[str, list[float]] = {way: [] for way in RECIPES}
    with tempfile.TemporaryDirectory() as directory:
        build(Path(directory) / "inputs")
        config = str(write_config(Path(directory), args.device, args.samples))
        environment = {
            "OMP_NUM_THREADS": "1",
            **ONE_HEAP,
            "HF_DATASETS_CACHE": f"{directory}/cache",
            "PYTHONDONTWRITEBYTECODE": "",  # a checkout runs from bytecode, too, as what pip installs does
        }

        def measure(what: str, which: str) -> dict[str, Any]:
            output_dir = f"{directory}/out_{what}_{len(which)}_{time.monotonic_ns()}"
            return measure_in_fresh_process("--measure", what, config, which, output_dir, environment=environment)

        reference = measure("process", RECIPES[OURS])["losses"]  # fills the caches as well
        for repeat in range(args.repeats):
            found = measure("steps", str(repeat % 2))
            for losses in found["losses"]:
                check_equal(losses, reference)
            stock, ours = (np.array(seconds[WARM_UP_STEPS:]) for seconds in found["seconds"])
            pairs += (ours / stock).tolist()
            for seconds, each in zip(step_seconds, (stock, ours), strict=True):
                seconds += each.tolist()
            print(f"steps: ours / stock {np.median(ours / stock):.4f}", flush=True)
            for way in RECIPES if repeat % 2 == 0 else reversed(RECIPES):
                start = time.perf_counter()
                losses = measure("process", RECIPES[way])["losses"]
                process_seconds[way].append(time.perf_counter() - start)
                check_equal(losses, reference)
                print(f"{way}: {process_seconds[way][-1]:.2f} s", flush=True)

        audited = measure("audit", "")
    audit, step = float(np.mean(audited["audits"])), float(np.median(audited["steps"]))
    audits_of_200 = 1 + 3 * audit / (200 * step)

    ratio, low, high = median_and_interval(pairs)
    process = [float(np.median(process_seconds[way])) for way in RECIPES]
    rows = ["| recipe | seconds per step | seconds per process |", "|---|---|---|"]
    for way, seconds, whole in zip(RECIPES, step_seconds, process, strict=True):
        rows.append(f"| {way} | {np.median(seconds):.4f} | {whole:.2f} |")
    rows.append(f"| ours / stock | {ratio:.4f} ({low:.4f} to {high:.4f}) | {process[1] / process[0]:.3f} |")
    write_report(
        "The cost of our recipe with recovery alone",
        device=args.device,
        facts=[
            f"{len(pairs)} pairs of steps of {BATCH_SIZE} samples; medians; in brackets where 95 % of medians lie",
            f"{args.repeats} processes of each recipe, whose ratio is as noisy as the machine",
            "the losses of all runs are equal bit for bit",
            f"{len(audited['audits'])} audits took {audit:.3f} s each, where a step of {AUDITED['batch_size']} samples "
            f"in micro-batches of {AUDITED['micro_batch_size']} took {step:.3f} s",
        ],
        rows=rows,
        figures={"per_step_ratio": round(ratio, 4), "audits_of_200_steps": round(audits_of_200, 4)},
        output=args.output,
    )


if __name__ == "__main__":
    main()
