"""The probe of a recipe: its training step, on its device, with the result kept for the next run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._memory import MemoryMeter
from adaptive_batching._micro_batches.cut import Capacity
from adaptive_batching._micro_batches.forward_cost import ForwardTimes
from adaptive_batching._probe.find import find_maximum_batch_size
from adaptive_batching._probe.sizes import ProbeResult
from adaptive_batching._report.record import Report
from adaptive_batching._torchtune.data import Sample, is_packed
from adaptive_batching._torchtune.host import Host, StockRun
from adaptive_batching._torchtune.kept_probe import Circumstances, kept_probe, only_cuts, runs_in_parts
from adaptive_batching._torchtune.objective import worst_case_sample
from adaptive_batching._torchtune.training_step import remedies, training_step
from adaptive_batching._trace.trace import trace_peak_memory
from adaptive_batching._trace.traced_step import TraceError
from adaptive_batching._trace.training import TrainingStep
from adaptive_batching._values import ByLength, Explore, Fixed, MicroBatchSize

log = logging.getLogger(__name__)

# Gain in tokens from which a probe at shorter samples is worth its training steps.
WORTH_PROBING = 1.1


@dataclass(frozen=True)
class Probed:
    """The largest batch size of a run, and what is known of the memory of a forward."""

    maximum: int
    reason: str
    """The bound that gives the maximum, for messages."""

    micro_batch_size: MicroBatchSize
    """As asked for, or smaller if that does not fit."""

    capacity: Capacity | None = None
    """Samples that fit in a forward, where that bounds micro-batches."""

    tokens: int = 0
    """Padded tokens of the largest forward that the probe has seen to fit."""


@dataclass(frozen=True)
class Probe:
    """What is asked of a run's training step: the largest batch of copies of ``sample``, at most ``upper``."""

    host: Host
    run: StockRun
    settings: AdaptiveBatchingConfig
    circumstances: Circumstances
    sample: Sample
    """As long as training can meet."""

    upper: int
    reason: str
    """What gives ``upper``, for messages."""

    folder: Path
    """Of the run, where the result is kept."""

    @property
    def _length(self) -> int:
        return len(self.host.objective.tokens(self.sample))

    @property
    def _include(self) -> int | None:
        return self.run.batch_size if self.settings.grows else None

    def result(self) -> ProbeResult:
        """Run the probe, or take the result that an earlier run has stored."""
        host, settings = self.host, self.settings
        if settings.fills_memory:  # what a forward may take is no size to round
            settings = replace(settings, round_to_power_of_two=False)
        facts = {"include": self._include, "upper": self.upper, "recipe": host.name, "sequence_length": self._length}
        return kept_probe(host, settings, self.circumstances, facts, self.folder / "probe.json", self._find)

    def probed(self, result: ProbeResult) -> Probed:
        """Return what the run makes of ``result``."""
        settings, tokens = self.settings, self.host.objective.size(self.sample)
        capacity = None
        if settings.fills_memory:
            shorter = [(at, batch_size) for at, batch_size, _ in result.shorter]
            capacity = Capacity(((tokens, result.enough or result.batch_size), *shorter))
        seen = result.batch_size * tokens
        found = Probed(result.batch_size, result.reason, settings.micro_batch_size, capacity, seen)
        return settled(settings, found, self.upper, self.reason)

    def _find(self, settings: AdaptiveBatchingConfig, meter: MemoryMeter) -> ProbeResult:
        host, sample = self.host, self.sample
        find = partial(
            find_maximum_batch_size,
            config=settings,
            meter=meter,
            upper=self.upper,
            upper_reason=self.reason,
            coarse=settings.fills_memory,  # how much of what fits is best used is another question
            ranks=host.ranks,
            scratch=self.folder,
        )
        in_parts = accumulates(host, self.run, settings, measures_noise=self.circumstances.measures_noise)
        times = ForwardTimes()
        step = partial(training_step, host, accumulates=in_parts, note=times.note)
        # Where the batch stays as it is, and is only cut, forwards need be no larger than is of use.
        result = find(
            step(sample),
            include=self._include,
            enough=times.enough if only_cuts(settings) else None,
            remedies=lambda: remedies(host, sample, self.circumstances.make_optimizers, accumulates=in_parts),
        )
        lengths_vary = not is_packed(host.loader.dataset) and host.objective.is_text(sample)
        by_length = isinstance(settings.micro_batch_size, (ByLength, Explore))
        if by_length and lengths_vary and settings.search == "predict" and result.enough is None:
            result = replace(result, shorter=self._at_shorter_lengths(result, step, find))
        return result

    def _at_shorter_lengths(
        self, result: ProbeResult, step: Callable[[Sample], TrainingStep], find: Callable[[TrainingStep], ProbeResult]
    ) -> list[tuple[int, int, int]]:
        """Return (tokens, batch size, peak bytes) at half the length and its halves, while more tokens fit there.

        They do where attention takes memory by the square of the length. The trace tells whether it does, and real
        steps whether the trace is right: the device may have a kernel that the trace does not know.
        """
        found: list[tuple[int, int, int]] = []
        host, sample, length = self.host, self.sample, self._length
        while length >= 4:
            tokens = result.batch_size * length
            shorter = length // 2
            half = host.objective.stretch(sample, shorter)
            if half is None or tokens >= self.upper * shorter:
                break  # all that there are fit
            if not host.ranks.all(_token_gain(step(sample), step(half), result.batch_size) > WORTH_PROBING):
                break
            sample, length = half, shorter
            log.info("more tokens fit where samples are shorter; probing at %d tokens per sample", length)
            result = find(step(sample))
            if result.batch_size * length < WORTH_PROBING * tokens:
                break
            found.append((length, result.batch_size, result.peak_bytes))
        return found


def find_maximum(
    host: Host, run: StockRun, settings: AdaptiveBatchingConfig, circumstances: Circumstances, report: Report
) -> Probed:
    """Find the largest batch size of a run: by a probe where one is needed, else from bounds and data."""
    upper, reason = upper_bound(host, run, settings)
    if not settings.probes:
        report.maximum(upper, reason)
        return Probed(upper, reason, settings.micro_batch_size)
    sample = worst_case_sample(
        host.loader.dataset,
        host.objective,
        sequence_length=settings.sequence_length,
        tokenizer_max=host.max_length,
        model_max=getattr(host.model, "max_seq_len", None),
    )
    probe = Probe(host, run, settings, circumstances, sample, upper, reason, report.directory)
    result = probe.result()
    report.probe(result, sequence_length=len(host.objective.tokens(sample)))
    return probe.probed(result)


def upper_bound(host: Host, run: StockRun, settings: AdaptiveBatchingConfig) -> tuple[int, str]:
    """Return the most samples that a batch can have, whatever memory there is, and the reason."""
    samples = host.samples_per_rank
    upper, reason = samples // run.accumulation, f"{samples} samples of data"
    if settings.keep_global_batch:
        upper, reason = run.window, "the global batch, which is kept"
    if settings.max_batch_size is not None and settings.max_batch_size <= upper:
        upper, reason = settings.max_batch_size, f"max_batch_size={settings.max_batch_size}"
    if run.samples is not None and run.samples < upper:
        upper, reason = run.samples, f"the {run.samples} samples of the run"
    if not settings.use_maximum_batch_size and not settings.grows:
        # A forward could take no more than an optimizer step has.
        upper, reason = run.window, "the samples of an optimizer step"
    return upper, reason


def settled(settings: AdaptiveBatchingConfig, found: Probed, upper: int, reason: str) -> Probed:
    """Return what a run makes of the largest size that fits; ``upper`` is the bound that does not come from memory."""
    maximum, bound, size = found.maximum, found.reason, found.micro_batch_size
    if isinstance(size, Fixed):
        if size.samples > maximum:
            log.warning("micro_batch_size=%d does not fit, the maximum is %d; taking that", size.samples, maximum)
            size = Fixed(maximum)
        maximum = maximum // size.samples * size.samples  # so that micro-batches come out even
    elif settings.fills_memory and settings.round_to_power_of_two:  # the probe has not rounded
        maximum = 1 << (maximum.bit_length() - 1)
    if settings.grows and not settings.growth_is_bound_by_memory:
        maximum, bound = upper, reason  # what does not fit at once is cut
    return replace(found, maximum=maximum, reason=bound, micro_batch_size=size)


def accumulates(host: Host, run: StockRun, settings: AdaptiveBatchingConfig, *, measures_noise: bool) -> bool:
    """Return True if a forward and backward can run while the gradients of another are held."""
    in_parts = measures_noise and host.num_replicas == 1  # in two at least
    return run.accumulation > 1 or runs_in_parts(settings) or in_parts


def _token_gain(step: TrainingStep, half_step: TrainingStep, batch_size: int) -> float:
    """Predicted token capacity at half length, relative to full length, from the rise of memory with the batch size.

    Both rises are of what traces have in use: a measured one would add its noise to one of them alone.
    """
    try:
        curve, half_curve = trace_peak_memory(step), trace_peak_memory(half_step)
    except TraceError as error:
        log.debug("whether more short samples fit cannot be predicted: %s", error)
        return 1.0
    rise = curve.peak_bytes(batch_size + 1) - curve.peak_bytes(batch_size)
    half_rise = half_curve.peak_bytes(2 * batch_size + 2) - half_curve.peak_bytes(2 * batch_size)
    return rise / half_rise if half_rise > 0 else 1.0
