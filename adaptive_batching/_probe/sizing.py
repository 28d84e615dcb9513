"""Decide what to ask of a probe, and what its answer means, for recipes, ``Trainer`` and ``plan``. Pure.

A probe finds the largest forward of copies of the longest sample. Its answer can bound two things:

    micro_batch_size   the batch, if                                the samples of a forward, if
    null               use_maximum_batch_size, or growing (*)       growing with grow_beyond_memory
    a number           use_maximum_batch_size, and not growing      (smaller than that number, it takes its place)
    auto, explore      use_maximum_batch_size, and not growing      always

(*) unless it grows beyond memory. Without a probe both are bound by the settings and the data alone.

Invariants, each held by ``tests/probe/test_sizing.py`` for every combination of settings:

- Nothing is probed that the run makes no use of, and no answer is made use of unless it was asked for.
- No batch and no forward is larger than the settings and the data allow, nor a forward larger than the probe's answer.
- With ``keep_global_batch`` a step has the samples that were configured.
- A larger answer never makes a batch, its bound or a forward smaller.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._growth.controller import Accumulation, FixedAccumulation, KeepGlobal
from adaptive_batching._probe.sizes import rounded_down
from adaptive_batching._values import ByLength, Explore, Fixed, MicroBatchSize, Whole

OF_A_STEP = "the samples of an optimizer step"


@dataclass(frozen=True)
class ProbeRequest:
    """A request to a probe: the sizes to try, and when to stop."""

    upper: int  # largest size to try; at least 1
    upper_reason: str = "upper bound"  # why no larger one is tried
    include: int | None = None  # a size to consider although it is not a power of two
    rounds: bool = True  # the answer is a power of two, ``include`` or none
    # Accept an answer up to an eighth below the maximum. If the prediction shows that the next candidate does not fit,
    # this saves the step that would prove it, and its out-of-memory error.
    coarse: bool = False
    in_parts: bool = False  # a forward runs while the gradients of another are held
    # With search="predict", look no further than is of use, by the times of the two smallest sizes: a batch stays as
    # it is, and is only split.
    may_stop_early: bool = False
    # With that, a forward of so many samples will do if the smallest size shows that it fits by far; None to time two
    # sizes first. For rows end to end, whose size is learnt in training.
    suffices: int | None = None


@dataclass(frozen=True)
class Sizes:
    """The sizes that a run trains with, as far as they are known before it has begun."""

    batch_size: int
    """Of the first step, if no checkpoint has another; above the maximum if more is configured than fits."""

    maximum: int
    """The largest batch: that of all steps, or the bound of growth."""

    reason: str
    """The bound that gives the maximum, for messages."""

    micro_batch_size: MicroBatchSize
    """As asked for, or smaller if that does not fit."""

    fits: int | None = None
    """Samples of the longest length that a forward may have, where the probe bounds forwards."""


@dataclass(frozen=True)
class Sizing:
    """The decisions of :func:`size_up`: what to probe, and how to read the answer."""

    probes: bool
    """True if something has to be measured."""

    request: ProbeRequest
    """The request to the probe. Its upper bound holds without a probe, too."""

    bounds_batch: bool
    """True if no batch may be larger than the answer."""

    bounds_forwards: bool
    """True if no forward may be larger than the answer, which ran while the gradients of another were held."""

    splits: bool
    """True if the settings have a batch run in parts, however much memory there is."""

    settings: AdaptiveBatchingConfig
    batch_size: int  # as configured
    accumulation: Accumulation
    keeps_batches: bool = False
    """True if with ``keep_global_batch`` it is not the batch that becomes larger, but its forwards."""

    @property
    def unprobed(self) -> Sizes:
        """The sizes of a run that needs no probe."""
        request = self.request
        return self._sizes(request.upper, request.upper_reason, self.settings.micro_batch_size)

    def sizes_from_probe(self, largest: int, bound: str) -> Sizes:
        """Return the sizes of a run whose probe has found ``largest``, which ``bound`` keeps from being larger."""
        settings, size, maximum = self.settings, self.settings.micro_batch_size, largest
        if isinstance(size, Fixed):
            size = Fixed(min(size.samples, largest))
            maximum = largest // size.samples * size.samples  # so that micro-batches come out even
        elif self.bounds_forwards and settings.round_to_power_of_two:  # which the probe was not asked to do
            maximum = 1 << (largest.bit_length() - 1)
            if maximum < largest and bound == "memory":
                bound = rounded_down(largest)
        if settings.grows and not self.bounds_batch:  # what does not fit at once is split
            maximum, bound = self.request.upper, self.request.upper_reason
        return self._sizes(maximum, bound, size, largest if self.bounds_forwards else None)

    def _sizes(self, maximum: int, reason: str, size: MicroBatchSize, fits: int | None = None) -> Sizes:
        settings, batch_size = self.settings, self.batch_size
        if settings.use_maximum_batch_size and not settings.grows:
            if self.keeps_batches and isinstance(self.accumulation, KeepGlobal):
                size = Fixed(self.accumulation.allowed(maximum))
            else:
                batch_size = self.accumulation.allowed(maximum)
        return Sizes(batch_size, maximum, reason, size, fits)

    def of_forwards(self, most: int) -> Sizing:
        """Return what is asked of a probe of forwards once the samples of a step are known to be at most ``most``."""
        return replace(self, request=replace(self.request, upper=most, upper_reason=OF_A_STEP))


def size_up(
    settings: AdaptiveBatchingConfig, *, batch_size: int, accumulation: int, samples: int,
    keeps_rest: bool = False, plans_first: bool = False, keeps_batches: bool = False,
) -> Sizing:  # fmt: skip
    """Decide what to ask of a probe, if anything, and what its answer means.

    Args:
        settings: Of the run.
        batch_size: As configured, on a device.
        accumulation: Batches of an optimizer step, as configured.
        samples: Of the data, for each replica.
        keeps_rest: True if the last step of an epoch has the samples that are left, be they fewer than a batch.
        plans_first: True if batches are planned before forwards are probed, which the largest step bounds; see
            :meth:`Sizing.of_forwards`.
        keeps_batches: True if with ``keep_global_batch`` it is not the batch that becomes larger, but its forwards.
    """
    size, grows, window = settings.micro_batch_size, settings.grows, batch_size * accumulation
    is_whole = isinstance(size, Whole)
    outgrows_memory = is_whole and grows and settings.grow_beyond_memory
    bounds_batch = is_whole and not outgrows_memory if grows else settings.use_maximum_batch_size
    bounds_forwards = outgrows_memory or isinstance(size, (ByLength, Explore))
    splits = bounds_forwards or isinstance(size, Fixed)
    needs_bound = grows and bounds_batch and settings.max_batch_size is None

    upper, reason = samples // accumulation, f"{samples} samples of data"
    if keeps_rest:
        upper = max(upper, min(batch_size, samples))
    if settings.keep_global_batch:
        upper, reason = window, "the global batch, which is kept"
    upper, reason = within(settings, upper, reason)
    if not (settings.resizes or plans_first):
        upper, reason = window, OF_A_STEP  # a forward could take no more

    include = min(batch_size, upper) if bounds_batch or grows else None
    rounds = settings.round_to_power_of_two and not bounds_forwards  # what a forward may take is no size to round
    request = ProbeRequest(
        upper, reason, include, rounds,
        coarse=bounds_forwards,
        in_parts=splits or accumulation > 1,
        may_stop_early=isinstance(size, ByLength) and not settings.use_maximum_batch_size,
    )  # fmt: skip
    if keeps_rest:
        batch_size = min(batch_size, samples)
    kept = KeepGlobal(batch_size * accumulation) if settings.keep_global_batch else None
    return Sizing(
        probes=settings.use_maximum_batch_size or bounds_forwards or needs_bound,
        request=request,
        bounds_batch=bounds_batch,
        bounds_forwards=bounds_forwards,
        splits=splits,
        settings=settings,
        batch_size=batch_size,
        accumulation=kept or FixedAccumulation(accumulation),
        keeps_batches=keeps_batches,
    )


def within(settings: AdaptiveBatchingConfig, upper: int, reason: str) -> tuple[int, str]:
    """Return a bound and its reason, or those of ``max_batch_size`` if that is at most as large."""
    most = settings.max_batch_size
    return (upper, reason) if most is None or most > upper else (most, f"max_batch_size={most}")
