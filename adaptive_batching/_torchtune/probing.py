"""The probe of a recipe: its training step, on its device, with the result kept for the next run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torchtune import config

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._memory import MemoryMeter
from adaptive_batching._micro_batches.cut import Capacity
from adaptive_batching._micro_batches.forward_cost import ForwardTimes
from adaptive_batching._probe.find import find_maximum_batch_size
from adaptive_batching._probe.result import ProbeResult
from adaptive_batching._probe.trial import TrainingStep
from adaptive_batching._report.record import Report
from adaptive_batching._torchtune.data import Sample, is_packed, worst_case_sample
from adaptive_batching._torchtune.host import Host, StockRun
from adaptive_batching._torchtune.kept_probe import Circumstances, kept_probe, only_cuts, runs_in_parts
from adaptive_batching._torchtune.stand_ins import without_kernels
from adaptive_batching._torchtune.step import remedies, training_step
from adaptive_batching._trace.trace import trace_peak_memory
from adaptive_batching._trace.traced_step import TraceError
from adaptive_batching._values import ByLength, Explore, Fixed, MicroBatchSize

log = logging.getLogger(__name__)

# Keys of a config that the memory of a training step cannot depend on. Any other that changes calls for another probe,
# known here or not: a probe too many costs a minute, a stored result that is wrong costs the run.
_NOT_OF_MEMORY = frozenset(
    {
        "output_dir", "checkpointer", "value_checkpointer", "resume_from_checkpoint", "save_adapter_weights_only",
        "save_every_n_steps",
        "seed", "shuffle", "epochs", "max_steps_per_epoch", "lr_scheduler",
        "metric_logger", "log_every_n_steps", "log_level", "log_peak_memory_stats",
        "dataset_val", "batch_size_val", "run_val_every_n_steps",
        # What of these matters has entries of its own.
        "batch_size", "use_maximum_batch_size", "batch_increase_function", "micro_batch_size", "adaptive_batching",
    }
)  # fmt: skip
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


def circumstances_of(cfg: DictConfig, *, measures_noise: bool) -> Circumstances:

    def make_optimizers(groups: Any) -> Any:
        traced = without_kernels(cfg.optimizer)
        return [config.instantiate(traced, list(group)) for group in groups]

    return Circumstances(partial(config_of_memory, cfg), make_optimizers, measures_noise)


def find_maximum(
    host: Host, run: StockRun, settings: AdaptiveBatchingConfig, circumstances: Circumstances, report: Report
) -> Probed:
    """Find the largest batch size of a run: by a probe where one is needed, else from bounds and data."""
    size = settings.micro_batch_size
    upper, reason = upper_bound(host, run, settings)
    if not settings.probes:
        report.maximum(upper, reason)
        return Probed(upper, reason, size)
    sample = worst_case_sample(
        host.loader.dataset,
        host.objective,
        sequence_length=settings.sequence_length,
        tokenizer_max=host.max_length,
        model_max=getattr(host.model, "max_seq_len", None),
    )
    length = len(host.objective.tokens(sample))
    result = probe_or_stored(host, run, settings, circumstances, sample, upper, reason, report.directory)
    report.probe(result, sequence_length=length)
    tokens = host.objective.size(sample)
    capacity = None
    if settings.fills_memory:
        shorter = [(at, batch_size) for at, batch_size, _ in result.shorter]
        capacity = Capacity(((tokens, result.enough or result.batch_size), *shorter))
    return settled(
        settings, Probed(result.batch_size, result.reason, size, capacity, result.batch_size * tokens), upper, reason
    )


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


def probe_or_stored(
    host: Host,
    run: StockRun,
    settings: AdaptiveBatchingConfig,
    circumstances: Circumstances,
    sample: Sample,
    upper: int,
    reason: str,
    folder: Path,
) -> ProbeResult:
    """Find the largest batch of copies of ``sample``, or take the result that an earlier run has stored in ``folder``.

    The sample is as long as training can meet. No size above ``upper`` is tried, a bound given by ``reason``.
    """
    # What a forward may take is no size to round.
    settings = replace(settings, round_to_power_of_two=settings.round_to_power_of_two and not settings.fills_memory)
    include = run.batch_size if settings.grows else None
    facts: dict[str, Any] = {"include": include, "upper": upper}
    facts |= {"recipe": host.name, "sequence_length": len(host.objective.tokens(sample))}

    def find(settings: AdaptiveBatchingConfig, meter: MemoryMeter) -> ProbeResult:
        return _probe(host, run, settings, circumstances, sample, upper, reason, folder, include, meter)

    return kept_probe(host, settings, circumstances, facts, folder / "probe.json", find)


def _probe(
    host: Host,
    run: StockRun,
    settings: AdaptiveBatchingConfig,
    circumstances: Circumstances,
    sample: Sample,
    upper: int,
    reason: str,
    folder: Path,
    include: int | None,
    meter: MemoryMeter,
) -> ProbeResult:
    dataset = host.loader.dataset
    find = partial(
        find_maximum_batch_size,
        config=settings,
        meter=meter,
        upper=upper,
        upper_reason=reason,
        coarse=settings.fills_memory,  # how much of what fits is best used is another question
        ranks=host.ranks,
        scratch=folder,
    )
    in_parts = accumulates(host, run, settings, circumstances)
    times = ForwardTimes()
    step = partial(training_step, host, accumulates=in_parts, note=times.note)
    # Where the batch stays as it is, and is only cut, forwards need be no larger than is of use.
    result = find(
        step(sample),
        include=include,
        enough=times.enough if only_cuts(settings) else None,
        remedies=lambda: remedies(host, sample, circumstances.make_optimizers, accumulates=in_parts),
    )
    lengths_vary = not is_packed(dataset) and host.objective.is_text(sample)
    by_length = isinstance(settings.micro_batch_size, (ByLength, Explore))
    if by_length and lengths_vary and settings.search == "predict" and result.enough is None:
        result = replace(result, shorter=_at_shorter_lengths(host, sample, result, upper, step, find))
    return result


def accumulates(host: Host, run: StockRun, settings: AdaptiveBatchingConfig, circumstances: Circumstances) -> bool:
    """Return True if a forward and backward can run while the gradients of another are held."""
    in_parts = circumstances.measures_noise and host.num_replicas == 1  # in two at least
    return run.accumulation > 1 or runs_in_parts(settings) or in_parts


def config_of_memory(cfg: DictConfig) -> dict[str, Any]:
    """Return the entries of a config that call for another probe when they change: all but those that cannot matter."""
    cfg = OmegaConf.merge(cfg, {"output_dir": ""})  # type: ignore[assignment]  # others are interpolated from it
    plain: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    found = {name: value for name, value in plain.items() if name not in _NOT_OF_MEMORY}
    found["optimizer"] = {k: v for k, v in found["optimizer"].items() if k != "lr"}  # what is tuned most often
    return found


def _at_shorter_lengths(
    host: Host,
    sample: Sample,
    result: ProbeResult,
    upper: int,
    step: Callable[[Sample], TrainingStep],
    find: Callable[[TrainingStep], ProbeResult],
) -> list[tuple[int, int, int]]:
    """Return (tokens, batch size, peak bytes) at half the length and its halves, while more tokens fit there.

    They do where attention takes memory by the square of the length. The trace tells whether it does, and real steps
    whether the trace is right: the device may have a kernel that the trace does not know.
    """
    found: list[tuple[int, int, int]] = []
    length = len(host.objective.tokens(sample))
    while length >= 4:
        tokens = result.batch_size * length
        shorter = length // 2
        half = host.objective.stretch(sample, shorter)
        if half is None or tokens >= upper * shorter:
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
