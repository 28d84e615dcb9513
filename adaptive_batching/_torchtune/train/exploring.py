"""``micro_batch_size: explore``: time the ways to run a step on the user's data, and recommend the fastest."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from adaptive_batching._device import unchanged_random_state
from adaptive_batching._growth.controller import BatchController
from adaptive_batching._memory import MemoryMeter, memory_meter
from adaptive_batching._probe.does_not_fit import DoesNotFitError
from adaptive_batching._report.record import Report
from adaptive_batching._step.fastest import Exploration, NothingRanError, explore
from adaptive_batching._step.limits import TokenLimit
from adaptive_batching._step.runner import StepRunner
from adaptive_batching._torchtune.stock.data import Sample, is_packed
from adaptive_batching._torchtune.stock.host import Host, StockRun
from adaptive_batching._torchtune.stock.less_memory import remedy
from adaptive_batching._torchtune.train.gradients import held_back
from adaptive_batching._torchtune.train.growing import StockSchedule
from adaptive_batching._torchtune.train.recipe_work import parallel_of
from adaptive_batching._torchtune.train.splitting import MicroBatch, SplitPolicy, Splitter
from adaptive_batching._torchtune.train.training_work import TrainingWork
from adaptive_batching._values import ByLength, Fixed, SplitSize

log = logging.getLogger(__name__)

# Neighbouring candidates differ by at least this factor: closer ones hardly differ in speed.
MIN_RATIO = 1.4


def sizes_to_time(batch_size: int, largest: int) -> list[int]:
    """Return divisors of ``batch_size`` that are at most ``largest``, ascending, thinned where they lie close."""
    chosen: list[int] = []
    for size in range(min(batch_size, largest), 0, -1):
        if batch_size % size == 0 and (not chosen or size * MIN_RATIO <= chosen[-1]):
            chosen.append(size)
    return chosen[::-1]


def settle_micro_batch_size(
    host: Host, run: StockRun, controller: BatchController, split_policy: SplitPolicy, stored: Mapping[str, Any],
    report: Report,
) -> SplitSize:  # fmt: skip
    """Return the ``micro_batch_size`` to train with: that of the run that is resumed, or the fastest."""
    most, chosen = split_policy.most_samples, stored.get("explored")
    assert most is not None, "explored without a probe"
    fits = not isinstance(chosen, int) or chosen <= most  # else the device is not that of the run that is resumed
    if chosen is not None and fits and stored.get("configured_batch_size") == run.batch_size:
        log.info("micro_batch_size %s, found by the run being resumed", chosen)
        return _split_size(chosen)
    meter = memory_meter(host.device)
    # A batch that grows is explored at the size that fills memory, as far as it can grow.
    batch_size = controller.accumulation.allowed(max(controller.batch_size, min(controller.maximum, most)))
    result = _explore(host, run, batch_size, controller.accumulation.batches_at(batch_size), split_policy, meter)
    path, chosen = report.directory / "explored.yaml", result.recommended.candidate
    host.ranks.on_first(lambda: _store(path, result, batch_size, meter.device_name))
    report.exploration(result)
    log.info("using micro_batch_size %s; to paste into the config: %s", chosen, path)
    return _split_size(chosen)


def _split_size(candidate: int | str) -> SplitSize:
    return Fixed(candidate) if isinstance(candidate, int) else ByLength()


def _explore(
    host: Host, run: StockRun, batch_size: int, batches: int, split_policy: SplitPolicy, meter: MemoryMeter
) -> Exploration:
    """Time each candidate on the same samples and find the fastest, for steps of so many ``batches`` of ``batch_size``.

    Weights, gradients, random state and data order are left as they were.
    """
    most, dataset = split_policy.most_samples, host.loader.dataset
    assert most is not None, "explored without a probe"
    sizes: list[int | str] = [*sizes_to_time(batch_size, most)]
    same_lengths = is_packed(dataset) or not host.objective.is_text(dataset[0])  # a split by length is one by number
    if not same_lengths and batch_size * batches > 1:
        sizes.append(str(ByLength()))
    windows = _windows(dataset, batch_size, batches, host.ranks.rank)
    seen: list[list[list[Sample]]] = []
    works = {}
    for size in sizes:
        policy = replace(split_policy, size=_split_size(size), limit=TokenLimit())
        works[size] = TrainingWork(host, Splitter(host, policy), StockSchedule(host, run))
    runners = {size: StepRunner(work, TokenLimit(), parallel_of(host), recovers=False) for size, work in works.items()}
    warm: set[int | str] = set()

    def measure(size: int | str, round_: int) -> float | None:
        if round_ == len(seen):
            seen.append(next(windows))
        window, work, runner = seen[round_], works[size], runners[size]
        work.splitter.begin_step()
        if isinstance(size, str):  # by length
            window = [[sample for batch in window for sample in batch]]
        parts = runner.filled_up([part for group in work.split([window], None) for part in group])
        if size not in warm:  # allocating memory and choosing kernels are paid for once
            first = parts if host.is_compiled else parts[:1]  # shapes may be compiled one by one
            if _seconds(host, runner, work, first, meter) is None:
                return None
        warm.add(size)
        return _seconds(host, runner, work, parts, meter)

    log.info("exploring micro_batch_size %s at batch size %d; base is %s", sizes, batch_size, sizes[0])
    try:
        with unchanged_random_state(meter.device):
            result = explore(sizes, measure)
    except NothingRanError as error:
        raise DoesNotFitError(
            f"{error}, although {most} samples per forward fit in the probe: something else has taken memory since, "
            f"or there are longer samples. Free the device, or set {remedy(host)}"
        ) from error
    log.info("explored\n%s", "\n".join(_table(result)))
    return result


def _seconds(
    host: Host, runner: StepRunner[Any, Any, Any], work: TrainingWork, parts: Sequence[MicroBatch], meter: MemoryMeter
) -> float | None:
    """Return the seconds of all ``parts`` on the slowest rank; None if one ran out of memory."""
    meter.synchronize()
    start = time.perf_counter()
    with held_back(host, is_last=False):
        failed = runner.run_once(work.runs(parts)).failed
    meter.synchronize()
    seconds = time.perf_counter() - start
    for parameter in host.model.parameters():
        parameter.grad = None
    if failed:
        work.splitter.timer.forget()
        return None
    work.splitter.timer.read()
    return host.ranks.largest(seconds)


def _windows(dataset: Any, batch_size: int, batches: int, rank: int) -> Iterator[list[list[Sample]]]:
    """Yield the batches of one optimizer step after another, drawn from the data by a separate generator."""
    window = batch_size * batches
    assert window <= len(dataset), (batch_size, batches, len(dataset))
    generator = torch.Generator().manual_seed(rank)
    while True:
        order = torch.randperm(len(dataset), generator=generator).tolist()
        for first in range(0, len(order) - window + 1, window):
            samples = [dataset[index] for index in order[first : first + window]]
            yield [samples[start : start + batch_size] for start in range(0, window, batch_size)]


def _table(result: Exploration) -> list[str]:
    lines = [f"  {'micro_batch_size':>16} {'s/step':>8} {'x base':>7} {'runs':>5}  confidence"]
    for estimate in result.estimates:
        mark = "  <- recommended" if estimate is result.recommended else ""
        lines.append(
            f"  {estimate.candidate:>16} {estimate.seconds:>8.3f} {estimate.speedup:>7.2f} {estimate.runs:>5}"
            f"  {100 * estimate.confidence:.0f} of 100{mark}"
        )
    return [*lines, f"  noise of one timing: {100 * result.noise:.1f} %"]


def _store(path: Path, result: Exploration, batch_size: int, where: str) -> None:
    """Write the table, as comments, and the line to paste into a config; warn if that is not possible."""
    comments = [f"Explored at batch_size={batch_size} on {where}; seconds of forward and backward of a step.", ""]
    comments += [*_table(result), "", "Paste this into the config so that the next run need not explore:"]
    text = "".join(f"# {line}".rstrip() + "\n" for line in comments)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}micro_batch_size: {result.recommended.candidate}\n")
    except OSError as error:
        log.warning("the result of exploring could not be saved to %s (%s)", path, error)
