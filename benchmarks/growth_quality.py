"""Does growing the batch help? Wall time and optimizer steps to the same held-out loss, for each increase function.

    pip install -e .
    python benchmarks/growth_quality.py              # about 25 minutes on 2 cores
    python benchmarks/growth_quality.py --device cuda --samples 4000

Fine-tunes the quickstart's model for a few epochs. Every way sees the same samples in the same order, from the same
weights; a seed gives another order. The loss on held-out samples is taken every quarter of an epoch, off the clock, as
is everything before the first step. Three controls keep their batch:

- the configured one, as stock trains it;
- the maximum, with the learning rate times the square root of what the batch gained;
- the maximum by accumulation, as stock would do it, with the learning rate as configured.

The configured learning rate is the best of three for the first control, so that no way wins by a rate that was too low.
All others scale it by ``lr_scaling: auto`` and run with ``micro_batch_size: auto``, as does the second control.

A way is compared at a loss of its own: its final one or the lowest final one of the controls, whichever is higher, so
that both it and a control reach it. The best control is the one that reaches that loss first, in seconds or in steps;
where between two evaluations that was is interpolated. A ratio below 1 is in favour of the way. A way that grows ends
its schedule at that loss, while the control may pass it with a rate that is still high; so the first control is run
again for an epoch less, its schedule with it, as a way to save time that needs nothing new.

The noise scale's overhead is measured apart, step by step: two recipes take turns, of which one measures it every fifth
step. The last line printed is a JSON object: of the increase functions whose final loss is at most 2 % above that of
the best control the one with the least seconds, its seconds and steps over those of the best control (medians over
seeds of paired ratios), and the overhead.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from common import write_report
from omegaconf import OmegaConf
from overhead import TakingTurns, run_all
from torchtune import config

from adaptive_batching.report.watcher import Watcher
from adaptive_batching.torchtune import AdaptiveBatching, load_stock
from adaptive_batching.torchtune.quickstart import build

ROOT = Path(__file__).parent.parent
BATCH_SIZE, MAXIMUM, EPOCHS = 4, 32, 3
WARM_UP_SAMPLES = 96
EVALUATIONS_PER_EPOCH = 4
LEARNING_RATES = (5e-4, 1e-3, 2e-3)
CONFIGURED, LARGEST, ACCUMULATED = "constant, configured", "constant, maximum, sqrt LR", "constant, accumulated"
AUTO = {"micro_batch_size": "auto"}
SHORTER = "constant, configured, an epoch less"
CONTROLS: dict[str, dict[str, Any]] = {
    CONFIGURED: {},
    LARGEST: {**AUTO, "use_maximum_batch_size": True},
    ACCUMULATED: {
        "gradient_accumulation_steps": MAXIMUM // BATCH_SIZE,
        "lr_scheduler.num_warmup_steps": WARM_UP_SAMPLES // MAXIMUM,
    },
}
FUNCTIONS: dict[str, dict[str, Any]] = {
    "step": {"every": 0.75},
    "multistep": {"milestones": [1, 2], "gamma": 2.83},
    "staged": {"stages": {0: 4, 0.5: 8, 1: 16, 2: 32}},
    "linear": {},
    "polynomial": {"power": 2},
    "cosine": {},
    "late_switch": {"fraction": 0.5},
    "replace_lr_decay": {},
    "on_plateau": {"patience": 1, "min_delta": 0.02},
    "gradient_noise_scale": {},
    "norm_test": {},
    "goodput": {},
}
stock = load_stock("full_finetune_single_device")


class Evaluating(Watcher):
    """Has a recipe evaluated after its steps."""

    def __init__(self, recipe: Measured) -> None:
        self._recipe = recipe

    def step(self, epoch: int, step: int, samples: int, loss: float, lr: float, recoveries: int = 0) -> None:
        self._recipe.note_step(samples)


class Measured(AdaptiveBatching, stock.FullFinetuneRecipeSingleDevice):  # type: ignore[misc, name-defined]
    """Our recipe, with a clock that stops while the held-out loss is taken, and no checkpoints."""

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        self.curve: list[tuple[float, int, float]] = []

    def watch(self, held_out: Any, every: int) -> None:
        """Take the loss on ``held_out`` after each ``every`` samples."""
        self._held_out, self._every, self._next = held_out, every, every
        self.watchers.append(Evaluating(self))
        self._samples = self._steps = 0
        self._off_clock = 0.0
        self.curve = [(0.0, 0, self._loss())]
        self._start = time.perf_counter()

    def train(self) -> None:
        assert self._session is not None
        self._session.loop(self, self.watchers).run()  # without the pictures that our recipe draws at the end
        if self.curve and self.curve[-1][1] < self._steps:
            self.evaluate()

    def note_step(self, samples: int) -> None:
        """Evaluate when it is time to, after a step on ``samples`` samples."""
        self._steps += 1
        self._samples += samples
        if self._samples >= self._next:
            self._next += self._every
            self.evaluate()

    def evaluate(self) -> None:
        """Add a point to the curve: seconds, steps, loss."""
        now = time.perf_counter()
        self.curve.append((now - self._start - self._off_clock, self._steps, self._loss()))
        self._off_clock += time.perf_counter() - now

    def save_checkpoint(self, epoch: int) -> None:
        pass

    def _loss(self) -> float:
        total = count = 0.0
        with torch.no_grad():
            for start in range(0, len(self._held_out), BATCH_SIZE):
                samples = [self._held_out[i] for i in range(start, min(start + BATCH_SIZE, len(self._held_out)))]
                batch = {key: value.to(self._device) for key, value in self._dataloader.collate(samples).items()}
                targets = int((batch["labels"][:, 1:] != self._loss_fn.ignore_index).sum())
                total += float(self._loss_step(batch)) * targets
                count += targets
        return total / count


def recipe_for(changes: dict[str, Any], inputs: Path, device: str, samples: int, directory: Path) -> Measured:
    """A recipe that has been set up; its probe is looked up where one has been."""
    cfg: Any = OmegaConf.load(ROOT / "recipes/configs/quickstart/full_single_device.yaml")
    section = {
        "max_batch_size": MAXIMUM, "lr_scaling": "auto", "increase_every": 0.25,
        "report_dir": str(directory / "report"), **changes.pop("adaptive_batching", {}),
    }  # fmt: skip
    changes = {
        "data_dir": str(inputs), "output_dir": str(directory / "run"), "device": device, "seed": 0, "epochs": EPOCHS,
        "batch_size": BATCH_SIZE, "use_maximum_batch_size": False, "batch_increase_function": None,
        "adaptive_batching": section, "dataset.split": f"train[:{samples}]",
        "lr_scheduler.num_warmup_steps": WARM_UP_SAMPLES // BATCH_SIZE, **changes,
    }  # fmt: skip
    for key, value in changes.items():
        OmegaConf.update(cfg, key, value, merge=False)
    recipe = Measured(cfg)
    recipe.setup(cfg)
    return recipe


def train(changes: dict[str, Any], inputs: Path, device: str, samples: int, directory: Path) -> list[Any]:
    """The curve of a run: seconds, optimizer steps and held-out loss, from the first weights to the last."""
    with quiet():
        recipe = recipe_for(dict(changes), inputs, device, samples, directory)
        cfg: Any = OmegaConf.load(ROOT / "recipes/configs/quickstart/full_single_device.yaml")
        cfg.data_dir = str(inputs)
        cfg.dataset.split = f"train[{samples}:{samples + samples // 5}]"
        held_out = config.instantiate(cfg.dataset, recipe._tokenizer)
        recipe._dataloader.sampler.seed = changes.get("seed", 0)  # stock's is always 0
        recipe.watch(held_out, samples // EVALUATIONS_PER_EPOCH)
        recipe.train()
        recipe.cleanup()
    return recipe.curve


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without torchtune's log of configs and its progress bars."""
    logging.disable(logging.INFO)
    with (
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stderr(nowhere),
        contextlib.redirect_stdout(nowhere),
    ):
        yield


def reached(curve: list[Any], target: float) -> tuple[float, float] | None:
    """Seconds and steps to the target, or None."""
    for before, after in pairwise(curve):
        if after[2] <= target:
            part = (before[2] - target) / (before[2] - after[2]) if before[2] > after[2] else 1.0
            part = min(max(part, 0.0), 1.0)
            return tuple(a + part * (b - a) for a, b in zip(before[:2], after[:2], strict=True))  # type: ignore[return-value]
    return None


def noise_overhead(inputs: Path, device: str, samples: int, directory: Path) -> float:
    """Seconds of training with the noise scale measured, over seconds without."""
    turns = TakingTurns(first=0)
    threads = []
    with quiet():
        for number, every in enumerate((None, 5)):
            changes = {
                **AUTO, "batch_size": MAXIMUM,
                "batch_increase_function": {"_component_": "adaptive_batching.growth.constant"},
                "adaptive_batching": {"noise_scale_every": every},
            }  # fmt: skip
            recipe = recipe_for(changes, inputs, device, samples, directory / str(number))
            recipe.watchers.append(turns.watcher(number))
            threads.append(threading.Thread(target=turns.train, args=(number, recipe)))
        run_all(threads)
    plain, measured = (sum(seconds[5:]) for seconds in turns.seconds)  # a whole number of fives: the first is warm-up
    return measured / plain


def evaluate(curves: dict[str, list[list[Any]]]) -> tuple[list[str], dict[str, Any]]:
    """A Markdown table, and the ratios of the best schedule."""
    seeds = range(len(curves[CONFIGURED]))

    def compared(way: str, seed: int) -> tuple[float, float]:
        """Seconds and steps over those of the best control."""
        target = max(curves[way][seed][-1][2], min(curves[control][seed][-1][2] for control in CONTROLS))
        mine = reached(curves[way][seed], target)
        controls = [found for name in CONTROLS if (found := reached(curves[name][seed], target)) is not None]
        assert mine is not None and controls
        return mine[0] / min(seconds for seconds, _ in controls), mine[1] / min(steps for _, steps in controls)

    rows = [
        "| way | final held-out loss | optimizer steps | seconds | seconds / best control's | steps, likewise |",
        "|---|---|---|---|---|---|",
    ]
    ratios: dict[str, tuple[float, float]] = {}
    losses: dict[str, float] = {}
    for way, runs in curves.items():
        pairs = [compared(way, seed) for seed in seeds]
        ratios[way] = (statistics.median(pair[0] for pair in pairs), statistics.median(pair[1] for pair in pairs))
        seconds, steps, losses[way] = (statistics.median(run[-1][i] for run in runs) for i in range(3))
        spread = max(run[-1][2] for run in runs) - min(run[-1][2] for run in runs)
        rows.append(
            f"| {way} | {losses[way]:.3f} (range {spread:.3f}) | {steps:.0f} | {seconds:.0f} "
            f"| {ratios[way][0]:.2f} | {ratios[way][1]:.2f} |"
        )
    worst = 1.02 * min(losses[control] for control in CONTROLS)
    good = [way for way in FUNCTIONS if losses[way] <= worst]
    best = min(good, key=lambda way: ratios[way][0]) if good else "none"
    seconds, steps = ratios.get(best, (float("nan"), float("nan")))
    return rows, {
        "best_schedule": best,
        "wall_time_vs_best_control": round(seconds, 3),
        "steps_vs_best_control": round(steps, 3),
    }


def main() -> None:
    """Train in every way, with every seed in turn, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--samples", type=int, default=320)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/growth_quality_<device>.md")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        inputs = directory / "inputs"
        build(inputs)

        def run(changes: dict[str, Any]) -> list[Any]:
            return train(changes, inputs, args.device, args.samples, directory)

        by_rate = {rate: run({"optimizer.lr": rate})[-1][2] for rate in LEARNING_RATES}
        rate = min(by_rate, key=lambda rate: by_rate[rate])
        print(f"final loss of {CONFIGURED} by learning rate: {by_rate}", flush=True)
        ways: dict[str, dict[str, Any]] = {**CONTROLS, SHORTER: {"epochs": EPOCHS - 1}}
        for function, arguments in FUNCTIONS.items():
            component = {"_component_": f"adaptive_batching.growth.{function}", **arguments}
            ways[function] = {**AUTO, "batch_increase_function": component}
        curves: dict[str, list[list[Any]]] = {way: [] for way in ways}
        for seed in range(args.seeds):
            for way in [*ways][:: -1 if seed % 2 else 1]:
                curves[way].append(run({"optimizer.lr": rate, "seed": seed, **ways[way]}))
                seconds, steps, loss = curves[way][-1][-1]
                print(f"seed {seed}, {way}: {seconds:.1f} s, {steps} steps, loss {loss:.4f}", flush=True)
        overhead = noise_overhead(inputs, args.device, args.samples, directory)
    rows, figures = evaluate(curves)
    rates = ", ".join(f"{loss:.3f} with {rate:g}" for rate, loss in by_rate.items())
    write_report(
        "Growing the batch: time and steps to the same held-out loss",
        device=args.device,
        facts=[
            f"{args.samples} samples, {EPOCHS} epochs, batch {BATCH_SIZE} to at most {MAXIMUM}, decided every quarter "
            f"of an epoch; medians of {args.seeds} seeds; {args.samples // 5} held-out samples",
            f"learning rate {rate:g}: the final losses of {CONFIGURED} were {rates}",
        ],
        rows=rows,
        figures={**figures, "noise_scale_overhead": round(overhead, 3)},
        output=args.output,
    )


if __name__ == "__main__":
    main()
