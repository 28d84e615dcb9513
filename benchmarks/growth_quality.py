"""Does growing the batch help? Steps, samples and seconds to the same held-out loss, for each increase function.

    pip install -e .[torchtune]
    python benchmarks/growth_quality.py              # about 40 minutes on 2 cores
    python benchmarks/growth_quality.py --device cuda --samples 4000

Fine-tunes the quickstart's model for a few epochs: all of its weights, from random ones, and with LoRA, on a base that
has first been trained on other samples. What LoRA learns is another task than that of the base, to find what a
description describes, as adapters on a base that knows the task change little. Every way sees the same samples in the
same order, from the same weights; a seed gives another order. The loss on held-out samples is taken every quarter of an
epoch, off the clock, as is everything before the first step. Three controls keep their batch:

- the configured one, as stock trains it;
- the maximum, with the learning rate times the square root of what the batch gained;
- the configured one for an epoch less, its schedule with it: a way to save time that needs nothing new.

The configured learning rate is the best of three for the first control, so that no way wins by a rate that was too low.
All others scale it by ``lr_scaling: auto`` and run with ``micro_batch_size: auto``, as does the second control.

A way is compared at a loss of its own: its final one or the lowest final one of the controls, whichever is higher, so
that both it and a control reach it. The best control is the one that reaches that loss first, in seconds or in steps;
where between two evaluations that was is interpolated. A ratio below 1 is in favour of the way. Steps and samples are
the same on every device; ``break_even.py`` says what follows for one on which a step costs more.

Runs are made in as many processes as there are cores, each with one thread. Seconds are of the processor, so that they
do not count each other; on a GPU runs take turns, and seconds are of the clock.

The last line printed is a JSON object: of the increase functions whose final loss is at most 2 % above that of the best
control (all weights) the one with the least seconds, and its seconds and steps over those of the best control (medians
over seeds of paired ratios); the fixed cost of a step from which each way is faster than every control, in milliseconds
at the cost of a sample that was measured, null for never.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from break_even import Point, costs, draw
from common import write_report
from growth_ways import (
    CONFIGURED,
    CONTROLS,
    EPOCHS,
    Curves,
    best_schedule,
    break_evens,
    table_of,
    ways_of,
)
from omegaconf import OmegaConf
from torchtune import config

from adaptive_batching._report.events import Watcher
from adaptive_batching._torchtune.cli.quickstart import Architecture, build, save_checkpoint
from adaptive_batching.torchtune import AdaptiveBatching, load_stock

ROOT = Path(__file__).parent.parent
BATCH_SIZE, MAXIMUM = 4, 32
WARM_UP_SAMPLES = 96
EVALUATIONS_PER_EPOCH = 4
LEARNING_RATES: dict[str, tuple[float, ...]] = {"full": (5e-4, 1e-3, 2e-3), "lora": (2e-3, 4e-3, 8e-3)}
LENGTH = 128  # tokens of a sample at most
BASE_SAMPLES = 1024
FORWARD, TURNED = "train.json", "turned.json"
MAX_DESCRIPTION_CHARS = 250  # at most about 100 tokens, so that the answer is not cut off
stock, stock_lora = load_stock("full_finetune_single_device"), load_stock("lora_finetune_single_device")


class Evaluating(Watcher):
    """Has a recipe evaluated after its steps."""

    def __init__(self, recipe: Measured) -> None:
        self._recipe = recipe

    def step(self, epoch: int, step: int, samples: int, loss: float, lr: float, recoveries: int = 0) -> None:
        self._recipe.note_step(samples)


class Measured(AdaptiveBatching):
    """Our mixin, with a clock that stops while the held-out loss is taken, and no checkpoints."""

    # Set by the stock recipes
    _loss_fn: Any
    _loss_step: Any
    _model: Any
    _tokenizer: Any

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        self.curve: list[Point] = []

    def watch(self, held_out: Any, every: int) -> None:
        """Take the loss on ``held_out`` after each ``every`` samples."""
        self._now = time.perf_counter if self._device.type == "cuda" else time.process_time
        self._held_out, self._every, self._next = held_out, every, every
        self.watchers.append(Evaluating(self))
        self._samples = self._steps = 0
        self._off_clock = 0.0
        self.curve = [Point(0, 0, 0.0, self._loss())]
        self._start = self._now()

    def train(self) -> None:
        assert self._planned_run is not None
        self._planned_run.train(self, self.watchers)  # without the pictures that our recipe draws at the end
        if self.curve and self.curve[-1].steps < self._steps:
            self.evaluate()

    def note_step(self, samples: int) -> None:
        """Evaluate when it is time to, after a step on ``samples`` samples."""
        self._steps += 1
        self._samples += samples
        if self._samples >= self._next:
            self._next += self._every
            self.evaluate()

    def evaluate(self) -> None:
        """Add a point to the curve."""
        now = self._now()
        self.curve.append(Point(self._steps, self._samples, now - self._start - self._off_clock, self._loss()))
        self._off_clock += self._now() - now

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


class Full(Measured, stock.FullFinetuneRecipeSingleDevice):  # type: ignore[misc, name-defined]
    """All weights are trained."""


class LoRA(Measured, stock_lora.LoRAFinetuneRecipeSingleDevice):  # type: ignore[misc, name-defined]
    """Adapters are trained."""


@dataclass(frozen=True)
class Setting:
    """Facts that all runs of one kind share."""

    kind: str
    """``full`` or ``lora``."""

    inputs: Path
    data: str
    """Name of the file of samples in ``inputs``."""

    base: Path
    """Folder of the weights that training starts from."""

    device: str
    samples: int
    directory: Path


def recipe_for(changes: Mapping[str, Any], setting: Setting) -> Measured:
    """A recipe that has been set up; its probe is looked up where one has been."""
    cfg: Any = OmegaConf.load(ROOT / f"recipes/configs/quickstart/{setting.kind}_single_device.yaml")
    section = {
        "max_batch_size": MAXIMUM, "lr_scaling": "auto", "increase_every": 0.25, "recover_from_oom": True,
        "report_dir": str(setting.directory / f"report_{setting.kind}_{os.getpid()}"),
        **changes.get("adaptive_batching", {}),
    }  # fmt: skip
    changes = {
        "data_dir": str(setting.inputs), "dataset.data_files": str(setting.inputs / setting.data),
        "output_dir": str(setting.directory / f"run_{os.getpid()}"),
        "checkpointer.checkpoint_dir": str(setting.base), "device": setting.device, "seed": 0, "epochs": EPOCHS,
        "batch_size": BATCH_SIZE, "use_maximum_batch_size": False, "batch_increase_function": None,
        "tokenizer.max_seq_len": LENGTH, "dataset.split": f"train[:{setting.samples}]",
        "lr_scheduler.num_warmup_steps": WARM_UP_SAMPLES // BATCH_SIZE, **changes, "adaptive_batching": section,
    }  # fmt: skip
    for key, value in changes.items():
        OmegaConf.update(cfg, key, value, merge=False)
    recipe = (LoRA if setting.kind == "lora" else Full)(cfg)
    recipe.setup(cfg)
    return recipe


def train(changes: Mapping[str, Any], setting: Setting) -> list[Point]:
    """The curve of a run, from the first weights to the last."""
    with quiet():
        recipe = recipe_for(changes, setting)
        cfg: Any = OmegaConf.load(ROOT / "recipes/configs/quickstart/full_single_device.yaml")
        cfg.data_dir = str(setting.inputs)
        cfg.dataset.data_files = str(setting.inputs / setting.data)
        cfg.dataset.split = f"train[{setting.samples}:{setting.samples + setting.samples // 5}]"
        held_out = config.instantiate(cfg.dataset, recipe._tokenizer)
        recipe._dataloader.sampler.seed = changes.get("seed", 0)  # stock's is always 0
        recipe.watch(held_out, max(setting.samples // EVALUATIONS_PER_EPOCH, 1))
        recipe.train()
        recipe.cleanup()
    return recipe.curve


def turn_around(inputs: Path) -> None:
    """Write samples of another task: to answer a description with what it describes."""
    pairs = json.loads((inputs / FORWARD).read_text(encoding="utf-8"))
    turned = [
        {"instruction": pair["output"], "output": pair["instruction"]}
        for pair in pairs
        if len(pair["output"]) <= MAX_DESCRIPTION_CHARS
    ]
    (inputs / TURNED).write_text(json.dumps(turned), encoding="utf-8")


def make_base(setting: Setting, rate: float) -> None:
    """Train all weights on samples that nothing else sees, and save them where LoRA starts from."""
    first = 2 * (setting.samples + setting.samples // 5)  # of other data, some are left out on the way
    with quiet():
        split = f"train[{first}:{first + BASE_SAMPLES}]"
        recipe = recipe_for({"dataset.split": split, "optimizer.lr": rate, "epochs": 2}, setting)
        recipe.train()
        save_checkpoint(recipe._model, setting.directory / "base", Architecture())
        recipe.cleanup()


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


Train = Callable[[Sequence[Mapping[str, Any]], Setting], list[list[Point]]]


def best_rate(train_all: Train, setting: Setting) -> tuple[float, str]:
    """The learning rate with which the configured batch ends lowest, and a line that says so."""
    rates = LEARNING_RATES[setting.kind]
    curves = train_all([{"optimizer.lr": rate} for rate in rates], setting)
    losses = {rate: curve[-1].loss for rate, curve in zip(rates, curves, strict=True)}
    rate = min(losses, key=lambda rate: losses[rate])
    tried = ", ".join(f"{loss:.3f} with {each:g}" for each, loss in losses.items())
    return rate, f"learning rate {rate:g}: the final losses of {CONFIGURED} were {tried}"


def all_curves(train_all: Train, setting: Setting, rate: float, seeds: int) -> Curves:
    """The curves of every way, one for each seed."""
    ways = ways_of(setting.kind)
    asked = [(way, {"optimizer.lr": rate, "seed": seed, **ways[way]}) for seed in range(seeds) for way in ways]
    curves = train_all([changes for _, changes in asked], setting)
    return {way: [curve for (of, _), curve in zip(asked, curves, strict=True) if of == way] for way in ways}


def in_parallel(pool: ProcessPoolExecutor, changes: Sequence[Mapping[str, Any]], setting: Setting) -> list[list[Point]]:
    """Train in each way, and say so as they end."""
    curves = []
    for number, curve in enumerate(pool.map(partial(train, setting=setting), changes)):
        curves.append(curve)
        print(f"{number + 1} of {len(changes)}: {changes[number]} {curve[-1]}", flush=True)
    return curves


def main() -> None:
    """Train in every way with every seed, and write the result file and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/growth_quality_<device>.md")
    args = parser.parse_args()
    output = args.output or Path(__file__).parent / "results" / f"growth_quality_{args.device}.md"

    workers = len(os.sched_getaffinity(0)) if args.device == "cpu" else 1
    os.environ["OMP_NUM_THREADS"] = "1"
    spawn = multiprocessing.get_context("spawn")
    rows, facts, points = [], [], {}
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name, ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        directory = Path(name)
        build(directory / "inputs")
        inputs = directory / "inputs"
        turn_around(inputs)
        full = Setting("full", inputs, FORWARD, inputs / "model", args.device, args.samples, directory)
        lora = Setting("lora", inputs, TURNED, directory / "base", args.device, args.samples, directory)
        train_all = partial(in_parallel, pool)
        rate, fact = best_rate(train_all, full)
        pool.submit(make_base, full, rate).result()
        for setting in (full, lora):
            kind = setting.kind
            if setting is lora:
                rate, fact = best_rate(train_all, setting)
            curves = all_curves(train_all, setting, rate, args.seeds)
            per_step, per_sample = costs(curves)
            facts.append(
                f"{kind}: {fact}; here a step costs {1000 * per_step:.0f} ms and a sample {1000 * per_sample:.0f} ms"
            )
            rows += [f"## {kind}", "", *table_of(curves), ""]
            picture = output.with_name(f"{output.stem}_{kind}.png")
            draw(curves, CONFIGURED, per_sample, picture, f"{kind}: when growing is faster")
            rows += [f"![time to the same loss over the fixed cost of a step]({picture.name})", ""]
            if setting is full:
                figures.update(best_schedule(curves))
            medians = {
                way: statistics.median(span[0] for span in break_evens(curves, way))
                for way in curves
                if way not in CONTROLS
            }
            points[kind] = {
                way: None if math.isinf(cost) else round(1000 * per_sample * cost) for way, cost in medians.items()
            }
    write_report(
        "Growing the batch: steps, samples and time to the same held-out loss",
        device=args.device,
        facts=[
            f"{args.samples} samples of at most {LENGTH} tokens, {EPOCHS} epochs, batch {BATCH_SIZE} to at most "
            f"{MAXIMUM}, decided every quarter of an epoch; {args.seeds} seeds; {args.samples // 5} held-out samples",
            "losses are means with 95 % intervals over seeds; 'pays from ... until' is the fixed cost of a step, in "
            "samples, at which a way is faster to its loss than every control: median over seeds, and range",
            *facts,
        ],
        rows=rows,
        figures={
            **figures,
            "seeds": args.seeds,
            "break_even_fixed_cost_ms": points,
        },
        output=output,
    )


if __name__ == "__main__":
    main()
