"""Lay out the growth of a run from its settings: increase function, accumulation, controller and course."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchtune.modules.peft import get_adapter_params

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._growth.course import Course, learning_rate_scale
from adaptive_batching._growth.epoch import Accumulation, FixedAccumulation, KeepGlobal, RunShape
from adaptive_batching._growth.increase import BatchController, IncreaseFunction, reads_noise_scale, resolve
from adaptive_batching._torchtune.cutting import Execution
from adaptive_batching._torchtune.growing import Growth
from adaptive_batching._torchtune.host import Host, StockRun
from adaptive_batching._torchtune.learning_rate import rule_for
from adaptive_batching._torchtune.noise_meter import NoiseMeter
from adaptive_batching._torchtune.probing import Probed
from adaptive_batching._torchtune.second_moment import SecondMoment
from adaptive_batching._values import ConfigError

log = logging.getLogger(__name__)

_STEPS_BETWEEN_MEASUREMENTS = 5


@dataclass(frozen=True)
class Increase:
    """An increase function, by name, and the measurements that it needs."""

    name: str = ""
    function: IncreaseFunction | None = None
    noise_scale_every: int | None = None
    """Optimizer steps from one measurement of the gradient noise scale to the next; None for no measurement."""

    @property
    def reader(self) -> str:
        """Name for messages of the setting that needs the noise scale."""
        return self.name or "noise_scale_every"


def resolve_increase(settings: AdaptiveBatchingConfig) -> Increase:
    """Import the increase function of a config; one that decides on the global batch is refused where that is kept."""
    every = settings.noise_scale_every if settings.enabled else None
    if settings.batch_increase_function is None:
        return Increase(noise_scale_every=every)
    name, function = resolve(settings.batch_increase_function)
    if not reads_noise_scale(function):
        return Increase(name, function, every)
    if settings.keep_global_batch:
        raise ConfigError(
            f"batch_increase_function={name!r} decides on the global batch, and "
            f"adaptive_batching.keep_global_batch=True keeps it; set keep_global_batch=False"
        )
    return Increase(name, function, every or _STEPS_BETWEEN_MEASUREMENTS)


def accumulation_of(settings: AdaptiveBatchingConfig, run: StockRun) -> Accumulation:
    return KeepGlobal(run.window) if settings.keep_global_batch else FixedAccumulation(run.accumulation)


def make_controller(
    host: Host,
    run: StockRun,
    settings: AdaptiveBatchingConfig,
    increase: Increase,
    accumulation: Accumulation,
    probed: Probed,
    stored: Mapping[str, Any],
) -> BatchController:
    """Return the controller that decides on batch sizes within the maximum, from where a resumed run has been."""
    configured, reason = run.batch_size, probed.reason
    maximum = accumulation.allowed(probed.maximum)
    if increase.function is None:
        start = maximum if settings.use_maximum_batch_size else configured
        maximum = start
        if start != configured:
            log.info("batch size %d instead of the configured %d: the largest, bound by %s", start, configured, reason)
    else:
        start = _size_before_this_run(configured, stored)
        if stored and stored["maximum"] != maximum:
            log.info("the maximum was %d in the run that is resumed; now it is %d", stored["maximum"], maximum)
        start = accumulation.allowed(start)  # a stored one may be of another accumulation
        if start > maximum:
            log.warning("batch size %d is above the maximum of %d, bound by %s; starting there", start, maximum, reason)
            start = maximum
        elif settings.use_maximum_batch_size:
            log.info("batch size starts at %d and grows to at most %d, bound by %s", start, maximum, reason)
    # One rank alone is asked: a function that is random or keeps a state cannot split them.
    return BatchController(start, maximum, reason, increase.function, increase.name, accumulation, host.ranks.on_first)


def make_growth(
    host: Host,
    run: StockRun,
    settings: AdaptiveBatchingConfig,
    increase: Increase,
    controller: BatchController,
    accumulation: Accumulation,
    execution: Execution,
    stored: Mapping[str, Any],
) -> Growth:
    """Lay out the course of a run, and return what follows it."""
    shape = RunShape(
        epochs=run.epochs,
        samples=host.samples_per_rank,
        accumulation=accumulation,
        replicas=host.num_replicas,
        max_steps=run.max_steps_per_epoch,
        decisions=settings.decisions_per_epoch,
        reference_steps=run.steps_per_epoch,
        reference_samples=run.window,
        run_samples=run.samples,
    )
    rule = rule_for(settings.lr_scaling, host.optimizers[0])
    course = Course(
        controller,
        shape,
        run.rates,
        lambda window: learning_rate_scale(rule, window / run.window, settings.max_lr_scale),
        initial_batch_size=min(run.batch_size, controller.maximum),
        grows_in_warmup=settings.grow_during_warmup,
    )
    every = increase.noise_scale_every
    noise = None if every is None else NoiseMeter(host, every, run.steps_per_epoch)
    state = stored.get("growth", {})
    moment = state.get("second_moment")
    second_moment = None
    if settings.keep_beta2_half_life or moment is not None:
        second_moment = SecondMoment(host.optimizers, moment or {}, follows=settings.keep_beta2_half_life)
    return Growth(host, run, course, execution, noise, second_moment, state)


def warn_of_lora(host: Host, largest: int, configured: int) -> None:
    """Say what is known of LoRA where steps on this device will have more samples than configured."""
    if largest > configured and get_adapter_params(host.model):
        log.warning(
            "the batch grows to as much as %.3g times the configured one, and LoRA loses more to a large batch than "
            "training all weights does, at any rank (Schulman et al. 2025, 'LoRA Without Regret'); compare the loss on "
            "held-out samples with that of a run at the configured size",
            largest / configured,
        )


def _size_before_this_run(configured: int, stored: Mapping[str, Any]) -> int:
    """Return the batch size that the next increase adds to: the stored one, unless the user has changed the size."""
    last = stored.get("batch_size")
    if last is None:
        return configured
    if stored["configured_batch_size"] != configured:
        log.info(
            "batch_size=%d was %d in the run that is resumed; starting from %d, not from its last size %d",
            configured, stored["configured_batch_size"], configured, last,
        )  # fmt: skip
        return configured
    return int(last)
