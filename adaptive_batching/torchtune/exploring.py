"""``micro_batch_size: explore``: time the ways to run a step on the user's data, and recommend the fastest."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from adaptive_batching.growth.controller import BatchController, largest_divisor
from adaptive_batching.memory import MemoryMeter, memory_meter
from adaptive_batching.micro_batches.fastest import Exploration, NothingRanError, explore
from adaptive_batching.micro_batches.forward_cost import ForwardCost
from adaptive_batching.micro_batches.limits import TokenLimit
from adaptive_batching.probe.find import DoesNotFitError
from adaptive_batching.random_state import unchanged_random_state
from adaptive_batching.torchtune.cutting import Cutter, MicroBatch
from adaptive_batching.torchtune.data import Sample, is_multimodal, is_packed
from adaptive_batching.torchtune.gradients import gather_gradients
from adaptive_batching.torchtune.recovery import remedy

log = logging.getLogger(__name__)

# Neighbouring candidates differ by at least this factor: closer ones hardly differ in speed.
MIN_RATIO = 1.4


def sizes_to_time(batch_size: int, largest: int) -> list[int]:
    """Divisors of ``batch_size`` that are at most ``largest``, ascending, thinned where they lie close."""
    divisors = [size for size in range(min(batch_size, largest), 0, -1) if batch_size % size == 0]
    chosen = divisors[:1]
    for size in divisors[1:]:
        if size * MIN_RATIO <= chosen[-1]:
            chosen.append(size)
    return chosen[::-1]


def settle_micro_batch_size(recipe: Any, controller: BatchController) -> None:
    """Settle on a ``micro_batch_size``: that of the run that is resumed, or the fastest."""
    assert recipe.report is not None and recipe.samples_per_forward is not None
    chosen = recipe.stored.get("explored")
    same_batch = recipe.stored.get("configured_batch_size") == recipe.reference_batch_size
    if isinstance(chosen, int) and chosen > recipe.samples_per_forward:
        same_batch = False  # nor is the device that of the run that is resumed
    if chosen is not None and same_batch:
        log.info("micro_batch_size %s, explored by the run that is resumed", chosen)
    else:
        recipe.forward_cost = ForwardCost()  # where it comes from a checkpoint, the device may have been another
        meter = memory_meter(recipe._device)
        # A batch that grows is explored at the size that fills memory, as far as it can grow.
        batch_size = max(controller.batch_size, min(controller.maximum, recipe.samples_per_forward))
        accumulation = recipe._gradient_accumulation_steps
        if recipe.settings.keep_global_batch:
            samples = recipe.reference_batch_size * recipe.reference_accumulation
            batch_size = largest_divisor(samples, at_most=batch_size)
            accumulation = samples // batch_size
        result = explore_micro_batches(recipe, batch_size, accumulation, meter)
        chosen = result.recommended.candidate
        path = recipe.report.directory / "explored.yaml"
        recipe.ranks.on_first(lambda: store(path, result, batch_size, meter.device_name))
        recipe.report.exploration(result)
        log.info("micro_batch_size %s is taken; to paste into the config: %s", chosen, path)
    recipe.explored = chosen
    recipe.settings = replace(recipe.settings, micro_batch_size=chosen)


def explore_micro_batches(recipe: Any, batch_size: int, accumulation: int, meter: MemoryMeter) -> Exploration:
    """Time each candidate on the same samples and find the fastest; weights, gradients, random state and data order
    are left as they were.

    Args:
        recipe: A recipe that has been set up and probed.
        batch_size: The batch size to run; micro-batches divide it.
        accumulation: Batches of an optimizer step.
        meter: The device's memory.

    Raises:
        DoesNotFitError: If every candidate runs out of memory.
    """
    sizes: list[int | str] = [*sizes_to_time(batch_size, recipe.samples_per_forward)]
    dataset = recipe._dataloader.dataset
    same_lengths = is_packed(dataset) or is_multimodal(dataset[0])  # where every cut by length is one by number
    if not same_lengths and batch_size * accumulation > 1:
        sizes.append("auto")
    windows = _windows(dataset, batch_size, accumulation, recipe.ranks.rank)
    seen: list[list[list[Sample]]] = []
    # One for all: what a forward of any candidate takes tells "auto" where to cut.
    cutters = {size: Cutter(recipe, size, recipe.forward_cost, TokenLimit(), learns=True) for size in sizes}
    warm: set[int | str] = set()

    def measure(size: int | str, round_: int) -> float | None:
        if round_ == len(seen):
            seen.append(next(windows))
        batches = seen[round_]
        if size == "auto":
            batches = [[sample for batch in batches for sample in batch]]
        cutter = cutters[size]
        micro_batches = [micro_batch for batch in batches for micro_batch in cutter.cut(batch)]
        if size not in warm:  # allocating memory and choosing kernels are paid for once
            first = micro_batches if recipe._compile else micro_batches[:1]  # shapes may be compiled one by one
            if _seconds(recipe, cutter, first, meter) is None:
                return None
        warm.add(size)
        return _seconds(recipe, cutter, micro_batches, meter)

    log.info("exploring micro_batch_size %s at batch size %d; base is %s", sizes, batch_size, sizes[0])
    try:
        with unchanged_random_state(meter.device):
            result = explore(sizes, measure)
    except NothingRanError as error:
        raise DoesNotFitError(
            f"{error}, though {recipe.samples_per_forward} samples in a forward fitted when probed: something else has "
            f"taken memory since, or the data have longer samples. Free the device, or set {remedy(recipe)}"
        ) from error
    log.info("explored\n%s", "\n".join(table(result)))
    return result


def _seconds(recipe: Any, cutter: Cutter, micro_batches: list[MicroBatch], meter: MemoryMeter) -> float | None:
    """Time of forward and backward of all ``micro_batches`` on the slowest rank; None if one ran out of memory."""
    meter.synchronize()
    start = time.perf_counter()
    with recipe.gate.closed():
        failed = gather_gradients(recipe, micro_batches, cutter.timed).failed
    meter.synchronize()
    seconds = time.perf_counter() - start
    for parameter in recipe._model.parameters():
        parameter.grad = None
    if failed:
        cutter.forget_timings()
        return None
    cutter.read_timings()
    return recipe.ranks.largest(seconds)  # type: ignore[no-any-return]


def _windows(dataset: Any, batch_size: int, accumulation: int, rank: int) -> Iterator[list[list[Sample]]]:
    """The batches of one optimizer step after the other, drawn from the data by a generator of their own."""
    assert batch_size * accumulation <= len(dataset), (batch_size, accumulation, len(dataset))
    generator = torch.Generator().manual_seed(rank)
    while True:
        order = torch.randperm(len(dataset), generator=generator).tolist()
        for first in range(0, len(order) - batch_size * accumulation + 1, batch_size * accumulation):
            yield [
                [dataset[index] for index in order[start : start + batch_size]]
                for start in range(first, first + batch_size * accumulation, batch_size)
            ]


def table(result: Exploration) -> list[str]:
    """A line for each candidate."""
    lines = [f"  {'micro_batch_size':>16} {'s/step':>8} {'x base':>7} {'runs':>5}  confidence"]
    for estimate in result.estimates:
        mark = "  <- recommended" if estimate is result.recommended else ""
        lines.append(
            f"  {estimate.candidate:>16} {estimate.seconds:>8.3f} {estimate.speedup:>7.2f} {estimate.runs:>5}"
            f"  {100 * estimate.confidence:.0f} of 100{mark}"
        )
    return [*lines, f"  noise of one timing: {100 * result.noise:.1f} %"]


def store(path: Path, result: Exploration, batch_size: int, where: str) -> None:
    """Write the table, as comments, and the line to paste into a config; where that is not possible, warn."""
    comments = [f"Explored at batch_size={batch_size} on {where}; seconds of forward and backward of a step.", ""]
    comments += [*table(result), "", "Paste this into the config, and the next run need not explore:"]
    text = "".join(f"# {line}".rstrip() + "\n" for line in comments)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}micro_batch_size: {result.recommended.candidate}\n")
    except OSError as error:
        log.warning("what was explored cannot be kept in %s (%s)", path, error)
