"""What our recipe costs with everything off, against torchtune's stock recipe: per optimizer step and per process.

    pip install -e .
    python benchmarks/overhead.py                    # about 6 minutes on 2 cores
    python benchmarks/overhead.py --device cuda

Both fine-tune the quickstart's model on its data for one epoch, from one config that none of our fields is in. Each run
is ``tune run`` in a fresh process, and the recipes alternate: stock, ours, ours, stock. A run of each comes before, so
that caches are filled. The losses of all runs must be equal bit for bit; if they are not, there is no result.

A step lasts from one call of the metric logger to the next. Step i has the same samples in every run, so it is compared
with itself: the median over ours by the median over stock's. The ratio per step is the median over the steps after
warm-up; its interval is where 95 % of ratios lie when the runs are drawn anew, with replacement. The time of a process
runs from its start to its exit; outside the steps are imports, set-up, the first step and the checkpoint. The last line
printed is a JSON object: the ratio per step.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import measure_in_fresh_process, write_report

# Our package is imported where it is used: stock's process must not pay for it.

ROOT = Path(__file__).parent.parent
STOCK, OURS = "stock", "ours, everything off"
RECIPES = {STOCK: "full_finetune_single_device", OURS: "recipes/full_finetune_single_device.py"}
BATCH_SIZE = 2  # steps of a tenth of a second or less: what one costs beside its arithmetic can show
WARM_UP_STEPS = 3
RESAMPLES = 2000


@dataclass(frozen=True)
class Run:
    """One process."""

    losses: list[float]
    """Of each step."""

    step_seconds: list[float]
    """Of each step after warm-up."""

    process_seconds: float
    """From the start of the process to its exit."""

    other_seconds: float
    """Of those, the ones before the first step was logged and after the last."""


def measure(recipe: str, config: str, output_dir: str) -> dict[str, list[float]]:
    """Do in this process what ``tune run`` does, and note when each step is logged, and its loss."""
    sys.path.insert(0, str(ROOT))  # our recipes/ before the folder that torchtune installs under the same name
    from torchtune._cli.tune import main as tune
    from torchtune.training.metric_logging import DiskLogger

    losses: list[float] = []
    times: list[float] = []

    def log_dict(self: Any, payload: dict[str, Any], step: int) -> None:
        losses.append(float(payload["loss"]))  # waits for the device
        times.append(time.perf_counter())

    DiskLogger.log_dict = log_dict
    sys.argv = ["tune", "run", recipe, "--config", config, f"output_dir={output_dir}"]
    try:
        tune()
    except SystemExit as end:  # a recipe ends with sys.exit(None)
        if end.code:
            raise
    return {"losses": losses, "times": times}


def run_in_fresh_process(way: str, config: Path) -> Run:
    """Train with a recipe in a process of its own."""
    environment = {
        "HF_DATASETS_CACHE": str(config.parent / "cache"),
        "PYTHONDONTWRITEBYTECODE": "",  # a checkout runs from bytecode, too, as what pip installs does
    }
    with tempfile.TemporaryDirectory(dir=config.parent) as output_dir:
        start = time.perf_counter()
        found = measure_in_fresh_process("--measure", RECIPES[way], str(config), output_dir, environment=environment)
        seconds = time.perf_counter() - start
    step_seconds = np.diff(found["times"]).tolist()  # of all but the first step
    return Run(found["losses"], step_seconds[WARM_UP_STEPS - 1 :], seconds, seconds - sum(step_seconds))


def write_config(directory: Path, device: str, samples: int) -> Path:
    """The quickstart's config for one epoch over ``samples``, without our fields."""
    from omegaconf import OmegaConf

    from adaptive_batching.torchtune.settings import FIELDS

    cfg: Any = OmegaConf.load(ROOT / "recipes/configs/quickstart/full_single_device.yaml")
    for field in FIELDS:
        cfg.pop(field, None)
    cfg.update(data_dir=str(directory / "inputs"), device=device, batch_size=BATCH_SIZE, epochs=1)
    cfg.dataset.split = f"train[:{samples}]"
    if device == "cuda":
        cfg.cudnn_deterministic_mode = True  # without it not even two runs of stock are equal
    path = directory / f"{samples}_samples.yaml"
    OmegaConf.save(cfg, path)
    return path


def check_equal_losses(way: str, losses: list[float], reference: list[float]) -> None:
    """Exit where a run did not train as the first one did."""
    if len(losses) != len(reference):
        sys.exit(f"{way} took {len(losses)} steps, the first run of stock {len(reference)}")
    for step, (loss, expected) in enumerate(zip(losses, reference, strict=True), start=1):
        if loss != expected:
            sys.exit(f"{way} has the loss {loss!r} in step {step}, the first run of stock {expected!r}")


def step_seconds(runs: list[Run]) -> Any:
    """Of each step after warm-up, the median over ``runs``."""
    return np.median([run.step_seconds for run in runs], axis=0)  # [steps]


def process_seconds(runs: list[Run]) -> Any:
    return np.median([run.process_seconds for run in runs])


def other_seconds(runs: list[Run]) -> Any:
    return np.median([run.other_seconds for run in runs])


def interval(runs: dict[str, list[Run]], seconds: Callable[[list[Run]], Any]) -> list[float]:
    """Where 95 % of the ratios, ours by stock's, lie when the runs are drawn anew: a bootstrap over the runs."""
    random = np.random.default_rng(0)

    def draw(way: str) -> list[Run]:
        return [runs[way][i] for i in random.integers(len(runs[way]), size=len(runs[way]))]

    ratios = [np.median(seconds(draw(OURS)) / seconds(draw(STOCK))) for _ in range(RESAMPLES)]
    bounds: list[float] = np.quantile(ratios, [0.025, 0.975]).tolist()
    return bounds


def evaluate(runs: dict[str, list[Run]]) -> tuple[list[str], dict[str, float]]:
    """A Markdown table of medians, and the ratio per step."""
    figures = {"seconds per step": step_seconds, "per process": process_seconds, "outside the steps": other_seconds}
    rows = [f"| recipe | {' | '.join(figures)} |", "|---" * (1 + len(figures)) + "|"]
    for way in RECIPES:
        cells = [f"{np.median(seconds(runs[way])):.4f}" for seconds in figures.values()]
        rows.append(f"| {way} | {' | '.join(cells)} |")
    ratios = {name: seconds(runs[OURS]) / seconds(runs[STOCK]) for name, seconds in figures.items()}
    cells = [f"{np.median(ratio):.4f}" for ratio in ratios.values()]
    rows.append(f"| ours / stock | {' | '.join(cells)} |")
    bounds = [interval(runs, seconds) for seconds in figures.values()]
    rows.append(f"| its 95 % interval | {' | '.join(f'{low:.4f} to {high:.4f}' for low, high in bounds)} |")
    low, high = np.quantile(ratios["seconds per step"], [0.25, 0.75])
    rows.append(f"\nOf the steps, the middle half has ratios from {low:.4f} to {high:.4f}.")
    return rows, {"per_step_ratio": round(float(np.median(ratios["seconds per step"])), 4)}


def main() -> None:
    """Run the recipes in turn and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--samples", type=int, default=240)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/overhead_<device>.md")
    parser.add_argument("--measure", nargs=3, metavar=("RECIPE", "CONFIG", "OUTPUT_DIR"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(*args.measure)))
        return
    steps = args.samples // BATCH_SIZE
    if steps <= WARM_UP_STEPS or args.repeats < 1:
        parser.error(
            f"needs --samples > {WARM_UP_STEPS * BATCH_SIZE} (more than the {WARM_UP_STEPS} warm-up steps of "
            f"{BATCH_SIZE}) and --repeats > 0, got --samples {args.samples} --repeats {args.repeats}"
        )

    from adaptive_batching.torchtune.quickstart import build

    runs: dict[str, list[Run]] = {way: [] for way in RECIPES}
    with tempfile.TemporaryDirectory() as directory:
        build(Path(directory) / "inputs")
        few = write_config(Path(directory), args.device, (WARM_UP_STEPS + 1) * BATCH_SIZE)
        for way in RECIPES:
            run_in_fresh_process(way, few)
        config = write_config(Path(directory), args.device, args.samples)
        for repeat in range(args.repeats):
            for way in (STOCK, OURS) if repeat % 2 == 0 else (OURS, STOCK):
                run = run_in_fresh_process(way, config)
                runs[way].append(run)
                check_equal_losses(way, run.losses, runs[STOCK][0].losses)
                milliseconds = np.median(run.step_seconds) * 1000
                print(
                    f"{way}: {milliseconds:.2f} ms per step, {run.process_seconds:.2f} s, last loss {run.losses[-1]!r}",
                    flush=True,
                )
    rows, ratios = evaluate(runs)
    write_report(
        "The cost of our recipe with everything off",
        device=args.device,
        facts=[
            f"{steps} steps of {BATCH_SIZE} samples, the first {WARM_UP_STEPS} left out; medians of {args.repeats} runs",
            f"the losses of all {2 * args.repeats} runs are equal bit for bit",
        ],
        rows=rows,
        figures=ratios,
        output=args.output,
    )


if __name__ == "__main__":
    main()
