"""The probe of a recipe: its training step, on its device, with the result kept for the next run."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from omegaconf import DictConfig, OmegaConf

from adaptive_batching.config import AdaptiveBatchingConfig, ConfigError, MemoryAmount
from adaptive_batching.memory import MemoryMeter, memory_meter
from adaptive_batching.micro_batches.cut import Capacity
from adaptive_batching.probe.find import find_maximum_batch_size, memory_budget
from adaptive_batching.probe.result import ProbeResult, load_result, store_result
from adaptive_batching.probe.trace import TraceError, trace_peak_memory
from adaptive_batching.probe.trial import TrainingStep
from adaptive_batching.ranks.agree import Ranks
from adaptive_batching.torchtune.data import Sample, is_multimodal, is_packed, sizes, stretch, worst_case_sample
from adaptive_batching.torchtune.step import remedies, training_step

log = logging.getLogger(__name__)

# Keys of a config that the memory of a training step cannot depend on. Any other that changes calls for another probe,
# known here or not: a probe too many costs a minute, a stored result that is wrong costs the run.
_NOT_OF_MEMORY = frozenset(
    {
        "output_dir", "checkpointer", "resume_from_checkpoint", "save_adapter_weights_only",
        "seed", "shuffle", "epochs", "max_steps_per_epoch", "lr_scheduler",
        "metric_logger", "log_every_n_steps", "log_level", "log_peak_memory_stats",
        # What of these matters has entries of its own.
        "batch_size", "use_maximum_batch_size", "batch_increase_function", "micro_batch_size", "adaptive_batching",
    }
)  # fmt: skip
# Bytes of host memory that a recipe takes on top of its steps: samples, the record, the progress bar, metrics.
_ADDED_BY_TRAINING = 16 * 2**20
# From how many times the tokens on a probe at shorter samples is worth its training steps.
WORTH_PROBING = 1.1
_VERSIONS = ("adaptive-batching", "torch", "torchtune", "torchao", "bitsandbytes")


def find_maximum(recipe: Any, cfg: DictConfig) -> tuple[int, str]:
    """The largest batch size of a run, and what bounds it; the recipe learns what a forward can take."""
    assert recipe.report is not None
    settings = recipe.settings
    samples = len(recipe._dataloader.sampler)
    upper, reason = samples // recipe._gradient_accumulation_steps, f"{samples} samples of data"
    if settings.keep_global_batch:
        upper = recipe.reference_batch_size * recipe.reference_accumulation
        reason = "the global batch, which is kept"
    if settings.max_batch_size is not None and settings.max_batch_size <= upper:
        upper, reason = settings.max_batch_size, f"max_batch_size={settings.max_batch_size}"
    if not settings.use_maximum_batch_size and recipe.increase is None:
        # All that a forward could take is what an optimizer step has.
        upper = recipe.reference_batch_size * recipe.reference_accumulation
        reason = "the samples of an optimizer step"
    if not settings.probes:
        recipe.report.maximum(upper, reason)
        return upper, reason
    sample, length = worst_case_sample(
        recipe._dataloader.dataset,
        sequence_length=settings.sequence_length,
        tokenizer_max=getattr(recipe._tokenizer, "max_seq_len", None),
        model_max=getattr(recipe._model, "max_seq_len", None),
    )
    result = probe(recipe, cfg, sample, length, upper, reason)
    recipe.report.probe(result, sequence_length=length)
    recipe.probed_tokens = result.batch_size * sizes([sample])[0]
    if settings.fills_memory:
        shorter = [(tokens, batch_size) for tokens, batch_size, _ in result.shorter]
        recipe.capacity = Capacity(((sizes([sample])[0], result.batch_size), *shorter))
    if isinstance(settings.micro_batch_size, int) and settings.micro_batch_size > result.batch_size:
        log.warning(
            "micro_batch_size=%d does not fit, the maximum is %d; taking that",
            settings.micro_batch_size,
            result.batch_size,
        )
        recipe.settings = replace(settings, micro_batch_size=result.batch_size)
    if recipe.increase is not None and not settings.growth_is_bound_by_memory:
        return upper, reason  # what does not fit at once is cut
    if isinstance(recipe.settings.micro_batch_size, int):
        size = recipe.settings.micro_batch_size
        return result.batch_size // size * size, result.reason  # so that micro-batches come out even
    if settings.fills_memory and settings.round_to_power_of_two:  # the probe has not rounded
        return 1 << (result.batch_size.bit_length() - 1), result.reason
    return result.batch_size, result.reason


def probe(recipe: Any, cfg: DictConfig, sample: dict[str, Any], length: int, upper: int, reason: str) -> ProbeResult:
    """Find the largest batch of copies of ``sample``, or take the result that an earlier run has stored.

    Args:
        recipe: A recipe that has been set up.
        cfg: Its config.
        sample: As long as training can meet.
        length: Its tokens.
        upper: No size above it is tried.
        reason: What bounds it.

    Raises:
        ConfigError: If the device's memory cannot be measured.
        DoesNotFitError: If a batch of one sample does not fit.
    """
    assert recipe.report is not None
    settings = recipe.settings
    try:
        meter = memory_meter(recipe._device)
    except NotImplementedError as error:
        raise ConfigError(str(error)) from error
    if meter.device.type == "cpu":
        settings = _with_room_for_training(settings, meter)
    # What a forward may take is no size to round.
    settings = replace(settings, round_to_power_of_two=settings.round_to_power_of_two and not settings.fills_memory)
    cuts_by_length = settings.cuts_by_length or settings.explores
    include = recipe.reference_batch_size if settings.batch_increase_function is not None else None
    ranks: Ranks = recipe.ranks
    path = recipe.report.directory / "probe.json"
    key = what_memory_may_depend_on(cfg, settings)
    key |= {"include": include, "upper": upper}
    key |= {"recipe": type(recipe).__name__, "sequence_length": length}
    key |= {"measures_noise": recipe.noise_scale_every is not None}
    key |= {"packed": is_packed(recipe._dataloader.dataset)}
    key |= {"device_name": meter.device_name, "total_bytes": meter.total_bytes}
    key |= {"allocator_settings": meter.allocator_settings()}
    key |= {"ranks": ranks.size, "sharded": recipe.collectives is not None}
    key |= {"python": platform.python_version(), **{name: _version(name) for name in _VERSIONS}}
    stored = ranks.on_first(lambda: load_result(path, key))
    if stored is not None:
        available = int(ranks.smallest(memory_budget(settings, meter)))
        peak = max([stored.peak_bytes, *(peak for *_, peak in stored.shorter)])
        if peak <= available:
            log.info("maximum batch size %d, from the stored probe %s", stored.batch_size, path)
            return stored
        log.info("stored probe result ignored: it takes %d bytes, and %d are left", peak, available)

    find = partial(
        find_maximum_batch_size,
        config=settings,
        meter=meter,
        upper=upper,
        upper_reason=reason,
        coarse=settings.fills_memory,  # how much of what fits is best used is another question
        ranks=ranks,
        scratch=recipe.report.directory,
    )
    result = find(training_step(recipe, sample), include=include, remedies=lambda: remedies(recipe, cfg, sample))
    lengths_vary = not is_packed(recipe._dataloader.dataset) and not is_multimodal(sample)
    if cuts_by_length and lengths_vary and settings.search == "predict":
        result = replace(result, shorter=_at_shorter_lengths(recipe, sample, result, upper, find))
    ranks.on_first(lambda: store_result(path, key, result))
    return result


def _with_room_for_training(settings: AdaptiveBatchingConfig, meter: MemoryMeter) -> AdaptiveBatchingConfig:
    """Where tensors and the program share the memory that is measured, leave what the program adds while it trains."""
    log.info("%d MiB of the host's memory are left for what training adds to it", _ADDED_BY_TRAINING >> 20)
    least = MemoryAmount(num_bytes=_ADDED_BY_TRAINING)
    if settings.memory_limit is None:
        headroom = max(settings.headroom, least, key=lambda amount: amount.of(meter.total_bytes))
        return replace(settings, headroom=headroom)
    limit = max(settings.memory_limit.of(meter.total_bytes) - _ADDED_BY_TRAINING, 0)
    return replace(settings, memory_limit=MemoryAmount(num_bytes=limit))


def what_memory_may_depend_on(cfg: DictConfig, settings: AdaptiveBatchingConfig) -> dict[str, Any]:
    """Return the settings that call for another probe when they change: all but those that cannot matter."""
    cfg = OmegaConf.merge(cfg, {"output_dir": ""})  # type: ignore[assignment]  # others are interpolated from it
    plain: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    found = {name: value for name, value in plain.items() if name not in _NOT_OF_MEMORY}
    found["optimizer"] = {k: v for k, v in found["optimizer"].items() if k != "lr"}  # what is tuned most often
    return found | {
        "search": settings.search,
        "round_to_power_of_two": settings.round_to_power_of_two,
        "memory_limit": repr(settings.memory_limit),
        "headroom": repr(settings.headroom),
        "fills_memory": settings.fills_memory,
        # A forward then runs while the gradients of the one before are held.
        "runs_in_parts": settings.fills_memory or settings.micro_batch_size is not None,
        "cuts_by_length": settings.cuts_by_length or settings.explores,
    }


def _at_shorter_lengths(
    recipe: Any, sample: Sample, result: ProbeResult, upper: int, find: Callable[[TrainingStep], ProbeResult]
) -> list[tuple[int, int, int]]:
    """(tokens, batch size, peak bytes) at half the length and its halves, as long as more tokens fit there.

    They do where attention takes memory by the square of the length. The trace tells whether it does, and real steps
    whether the trace is right: the device may have a kernel that the trace does not know.
    """
    found: list[tuple[int, int, int]] = []
    while len(sample["tokens"]) >= 4:
        tokens = result.batch_size * len(sample["tokens"])
        half = stretch(sample, len(sample["tokens"]) // 2)
        if tokens >= upper * len(half["tokens"]):
            break  # all that there are fit
        if not recipe.ranks.all(_token_gain(recipe, result, half) > WORTH_PROBING):
            break
        sample, length = half, len(half["tokens"])
        log.info("more tokens fit where samples are shorter; probing at %d tokens per sample", length)
        result = find(training_step(recipe, sample))
        if result.batch_size * length < WORTH_PROBING * tokens:
            break
        found.append((length, result.batch_size, result.peak_bytes))
    return found


def _token_gain(recipe: Any, result: ProbeResult, half: Sample) -> float:
    """How many times as many tokens fit at ``half`` the length, by what a token more takes there and at the whole."""
    curve = dict(result.predicted)
    beyond = min((size for size in curve if size > result.batch_size), default=None)
    if beyond is None:
        return 1.0  # no trace was possible
    try:
        half_curve = trace_peak_memory(training_step(recipe, half))
    except TraceError as error:
        log.debug("whether more short samples fit cannot be predicted: %s", error)
        return 1.0
    rise = curve[beyond] - curve[result.batch_size]
    half_rise = half_curve.peak_bytes(2 * beyond) - half_curve.peak_bytes(2 * result.batch_size)
    return rise / half_rise if half_rise > 0 else 1.0


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
