"""One epoch over the quickstart's data, the same 64 samples in each optimizer step, run in several ways.

    pip install -e .[torchtune]
    python benchmarks/epoch_time.py                  # about 15 minutes on 2 cores
    python benchmarks/epoch_time.py --device cuda --repeats 3
    python benchmarks/epoch_time.py --recipe dpo kd  # preferences and distillation: see dpo_and_kd.py

Samples are truncated only at the 512 tokens that the model takes.

- stock, ``batch_size=64``: one forward for each step;
- stock, ``batch_size=4 gradient_accumulation_steps=16``: sixteen forwards of the samples as they come;
- stock, ``packed=True``: packs of 512 tokens, as many in a step as hold 64 samples on average, so not the same steps;
- ours, ``batch_size=64 micro_batch_size=auto``: samples end to end, in rows of as many tokens as are of use;
- ours, the same with ``adaptive_batching.padding=True``: sorted by length, split at the least measured cost;
- ours, the same with rows as long as fit, to see what it costs or gains that rows have the size that is of use;
- the same where little memory is left, and the same with the largest forward that fits probed in full, as
  ``use_maximum_batch_size`` needs it, to see what a probe no larger than is of use costs in speed.

Each run is a fresh process; the ways alternate. Only ``recipe.train()`` is timed, its checkpoint included; set-up is
reported beside it, and the probe apart.

The bound that no way of splitting can beat is the number of real tokens times the best time per token: a forward and
backward of unpadded batches of many lengths and sizes is timed, and the fastest counts. No split need reach it, as each
forward has a fixed cost and each sample a length of its own; from the same times follows what the best split of a step
would take. Rows make logits only for tokens that predict a target, and all other batches for every token, also those of
the bound, so that an epoch of rows can take less. What an epoch takes beyond the bound is named part by part. The last
line printed is a JSON object of ratios of medians, with the largest relative difference of a step's loss to the first
way's, and padded over real tokens of ours.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dpo_and_kd
import numpy as np
import torch
from common import measure_in_turns, write_report
from omegaconf import OmegaConf
from timed_epoch import time_epoch
from torchtune import config

from adaptive_batching._memory.meter import MemoryMeter, memory_meter
from adaptive_batching._probe.find import find_largest
from adaptive_batching._step.forward_times import ForwardTimes
from adaptive_batching._step.row_size import RowSize
from adaptive_batching._torchtune.cli.quickstart import build
from adaptive_batching._torchtune.train import probing
from adaptive_batching.torchtune import AdaptiveBatching, load_stock

ROOT = Path(__file__).parent.parent
BATCH_64, ACCUMULATED, PACKED = "stock, batch_size=64", "stock, 4 x 16 accumulated", "stock, packed"
OURS, NEAR, FULLY = "ours, micro_batch_size=auto", "ours, little memory", "ours, fully probed"
PADDED, LONGEST = "ours, padded", "ours, rows as long as fit"
BOUND = "the bound"
AUTO = {"batch_size": 64, "gradient_accumulation_steps": 1, "micro_batch_size": "auto"}
WAYS: dict[str, dict[str, Any]] = {
    BATCH_64: {"batch_size": 64, "gradient_accumulation_steps": 1},
    ACCUMULATED: {"batch_size": 4, "gradient_accumulation_steps": 16},
    PACKED: {"gradient_accumulation_steps": 1, "dataset.packed": True},
    OURS: AUTO,
    PADDED: {**AUTO, "adaptive_batching": {"memory_limit": "2GiB", "padding": True}},
    LONGEST: AUTO,
    NEAR: {**AUTO, "adaptive_batching": {"memory_limit": "640MiB"}},
    FULLY: AUTO,
    BOUND: {"batch_size": 256, "gradient_accumulation_steps": 1},  # the most samples of a timed batch
}
OF_OURS = (OURS, PADDED, LONGEST, NEAR, FULLY)
SAME_STEPS = (BATCH_64, ACCUMULATED, *OF_OURS)
# Shapes of unpadded batches whose forward and backward is timed for the bound.
LENGTHS, MOST_TOKENS, TIMES = (16, 32, 64, 128, 256, 512), 4096, 5
stock = load_stock("full_finetune_single_device")


class Ours(AdaptiveBatching, stock.FullFinetuneRecipeSingleDevice):  # type: ignore[misc, name-defined]
    """The recipe of the same name."""


def measure(way: str, inputs: str, device: str, samples: int) -> dict[str, Any]:
    """Train one epoch in this process, or time forwards for the bound."""
    if way == FULLY:
        ForwardTimes.enough = lambda self: None  # type: ignore[method-assign]
    if way == LONGEST:
        RowSize.tokens = lambda self, of_step, limit: limit  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as output_dir:
        recipe, set_up, probed = set_up_recipe(way, inputs, output_dir, device, samples)
        if way == BOUND:
            return bounds(recipe, memory_meter(device))
        return {"set_up_seconds": round(set_up - probed, 2), "probe_seconds": round(probed, 2), **time_epoch(recipe)}


def set_up_recipe(way: str, inputs: str, output_dir: str, device: str, samples: int) -> tuple[Any, float, float]:
    """Return the recipe after its set-up, the seconds of that, and those of the probe in it."""
    cfg: Any = OmegaConf.load(ROOT / "recipes/configs/quickstart/full_single_device.yaml")
    changes = {
        "data_dir": inputs, "output_dir": output_dir, "device": device, "epochs": 1,
        "use_maximum_batch_size": False, "batch_increase_function": None, "clip_grad_norm": None,
        "adaptive_batching": {"memory_limit": "2GiB"},
        "tokenizer.max_seq_len": 512,
        "optimizer": {"_component_": "torch.optim.SGD", "lr": 0.1},  # Adam makes rounding as large as its step
        **WAYS[way],
    }  # fmt: skip
    for key, value in changes.items():
        OmegaConf.update(cfg, key, value, merge=False)
    cfg.dataset.split = f"train[:{samples}]"
    recipe_class = Ours if way in OF_OURS else stock.FullFinetuneRecipeSingleDevice
    if way == PACKED:
        dataset = config.instantiate(cfg.dataset, config.instantiate(cfg.tokenizer))
        cfg.batch_size = max(round(len(dataset) * 64 / samples), 1)
    recipe = recipe_class(cfg)
    probed = 0.0

    def timed(find: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal probed
        start = time.perf_counter()
        try:
            return find(*args, **kwargs)
        finally:
            probed += time.perf_counter() - start

    vars(probing)["find_largest"] = functools.partial(timed, find_largest)
    start = time.perf_counter()
    recipe.setup(cfg)
    return recipe, time.perf_counter() - start, probed


def bounds(recipe: Any, meter: MemoryMeter) -> dict[str, Any]:
    """Time a forward and backward of unpadded batches of many shapes.

    Returns:
        The least seconds per token, and the seconds of an epoch's forwards if each step is split as is best by these
        times: a fixed part, one for each token, and one for each pair of tokens in a sample, fitted to them.
    """
    least: dict[tuple[int, int], float] = {}
    for _ in range(TIMES):
        for length in LENGTHS:
            for size in (2**k for k in range((MOST_TOKENS // length).bit_length())):
                tokens = torch.randint(8, 4096, (size, length), device=recipe._device)
                batch = {"tokens": tokens, "labels": tokens.clone()}
                start = time.perf_counter()
                recipe._loss_step(batch).backward()
                meter.synchronize()
                least[length, size] = min(time.perf_counter() - start, least.get((length, size), math.inf))
    shapes = np.array([*least], dtype=np.float64)
    terms = np.stack([np.ones(len(shapes)), shapes.prod(1), shapes.prod(1) * shapes[:, 0]], 1)
    seconds = np.array([*least.values()])
    fitted = np.linalg.lstsq(terms / seconds[:, None], np.ones(len(seconds)), rcond=None)[0]  # least relative error
    rows = [int((row != recipe._tokenizer.pad_id).sum()) for batch in recipe._dataloader for row in batch["tokens"]]
    steps = [sorted(rows[start : start + 64]) for start in range(0, len(rows), 64)]
    return {
        "seconds_per_token": min(value / (length * size) for (length, size), value in least.items()),
        "best_cut_seconds": sum(best_split(step, *fitted) for step in steps),
        "fixed_seconds": fitted[0],
    }


def best_split(lengths: list[int], fixed: float, per_token: float, per_pair: float) -> float:
    """Return the least seconds that the samples of a step, sorted by length, take in forwards of neighbours."""
    least = [0.0]
    for end, length in enumerate(lengths, start=1):
        seconds = length * (per_token + per_pair * length)  # of a sample that is padded to this length
        least.append(min(least[start] + fixed + (end - start) * seconds for start in range(end)))
    return least[-1]


def evaluate(results: dict[str, list[dict[str, Any]]]) -> tuple[list[str], dict[str, float]]:
    """Markdown tables of medians, and the ratios."""

    def median(way: str, key: str) -> float:
        return statistics.median(result[key] for result in results[way])

    ours = median(OURS, "seconds")
    per_token = min(result["seconds_per_token"] for result in results[BOUND])
    bound = median(OURS, "real") * per_token
    rows = [
        "| way | seconds | seconds/ours | of processor | forwards | padded/real tokens | peak MiB | set-up seconds "
        "| of the probe |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for way in results:
        if way == BOUND:
            best = median(BOUND, "best_cut_seconds")
            rows.append(f"| forwards of the best split | {best:.1f} | {best / ours:.2f} | | | | | | |")
            rows.append(f"| {way} | {bound:.1f} | {bound / ours:.2f} | | | 1.00 | | | |")
            continue
        rows.append(
            f"| {way} | {median(way, 'seconds'):.1f} | {median(way, 'seconds') / ours:.2f} "
            f"| {median(way, 'processor'):.1f} | {median(way, 'forwards'):.0f} "
            f"| {median(way, 'padded') / median(way, 'real'):.2f} "
            f"| {median(way, 'peak_mib'):.0f} | {median(way, 'set_up_seconds'):.1f} "
            f"| {median(way, 'probe_seconds'):.1f} |"
        )
    padding = (median(OURS, "padded") - median(OURS, "real")) * per_token
    forwards = median(OURS, "seconds_in_forwards") - median(OURS, "padded") * per_token
    fixed = median(OURS, "forwards") * median(BOUND, "fixed_seconds")
    optimizer, checkpoint = median(OURS, "seconds_in_optimizer"), median(OURS, "seconds_in_checkpoint")
    rest = ours - bound - padding - forwards - optimizer - checkpoint
    parts = {
        "the bound": bound,
        "padding": padding,
        "the fixed cost of forwards": fixed,
        "samples of lengths that take longer than the best": forwards - fixed,
        "the optimizer": optimizer,
        "the checkpoint": checkpoint,
        "all else, such as collating and metrics": rest,
    }
    rows += ["", f"What an epoch of {OURS!r} consists of:", "", "| part | seconds | share |", "|---|---|---|"]
    rows += [f"| {part} | {seconds:.2f} | {100 * seconds / ours:.1f} % |" for part, seconds in parts.items()]
    losses = [result["losses"] for way in SAME_STEPS for result in results[way]]
    assert len({len(each) for each in losses}) == 1, "the ways took different numbers of steps"
    difference = max(abs(a - b) / b for each in losses for a, b in zip(each, losses[0], strict=True))
    return rows, {
        "speedup_vs_batch_64": round(median(BATCH_64, "seconds") / ours, 2),
        "speedup_vs_accumulation": round(median(ACCUMULATED, "seconds") / ours, 2),
        "speedup_vs_packed": round(median(PACKED, "seconds") / ours, 2),
        "speedup_vs_padded": round(median(PADDED, "seconds") / ours, 2),
        "processor_vs_padded": round(median(PADDED, "processor") / median(OURS, "processor"), 2),
        "speed_kept_by_size_of_rows": round(median(LONGEST, "seconds") / ours, 2),
        "loss_difference": float(f"{difference:.1e}"),
        "padding_ratio": round(median(OURS, "padded") / median(OURS, "real"), 3),
        **of_auto(results),
    }


def of_auto(results: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """What ``auto`` costs before the epoch, what of its speed that keeps, and how near that is to the bound."""

    def median(way: str, key: str) -> float:
        return statistics.median(result[key] for result in results[way])

    ours = median(OURS, "seconds")
    per_token = min(result["seconds_per_token"] for result in results[BOUND])
    return {
        "auto_setup_over_epoch": round(median(OURS, "set_up_seconds") / ours, 3),
        "auto_setup_over_epoch_at_most": round(
            max(result["set_up_seconds"] / result["seconds"] for result in results[OURS]), 3
        ),
        "auto_setup_over_epoch_in_little_memory": round(median(NEAR, "set_up_seconds") / median(NEAR, "seconds"), 3),
        "auto_speed_kept": round(median(FULLY, "seconds") / ours, 3),
        "auto_over_bound": round(median(OURS, "real") * per_token / ours, 3),
        "auto_over_best_cut": round(median(BOUND, "best_cut_seconds") / median(OURS, "seconds_in_forwards"), 3),
    }


def main() -> None:
    """Measure the ways in turn and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", nargs="+", choices=["sft", *dpo_and_kd.KINDS], default=["sft"])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--samples", type=int, help="default: 1280, of other recipes than sft 384")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/epoch_time_<device>.md")
    parser.add_argument("--measure", nargs=2, metavar=("WAY", "INPUTS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if "sft" not in args.recipe:
        dpo_and_kd.main(args)
        return
    if len(args.recipe) > 1:
        parser.error("--recipe sft is measured alone")
    samples = args.samples or 1280
    if args.measure:
        way, inputs = args.measure
        print(json.dumps(measure(way, inputs, args.device, samples)))
        return

    with tempfile.TemporaryDirectory() as directory:
        inputs = Path(directory) / "inputs"
        build(inputs)
        options = ["--device", args.device, "--samples", str(samples)]
        results = measure_in_turns(WAYS, args.repeats, lambda way: [*options, "--measure", way, str(inputs)])
    rows, ratios = evaluate(results)
    difference = f"losses of every step differ by at most {ratios['loss_difference']:.1e} of their value"
    write_report(
        "One epoch, 64 samples in each optimizer step",
        device=args.device,
        facts=[f"{samples} samples, medians of {args.repeats}; {difference}"],
        rows=rows,
        figures=ratios,
        output=args.output,
    )


if __name__ == "__main__":
    main()
