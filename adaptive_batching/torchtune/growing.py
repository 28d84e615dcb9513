"""The batch size of a recipe while it trains: its course followed, and what decisions need to know gathered."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig

from adaptive_batching.growth.controller import BatchController, Decision, largest_divisor
from adaptive_batching.growth.course import Course, RunShape, learning_rate_scale
from adaptive_batching.torchtune.cutting import MicroBatch
from adaptive_batching.torchtune.learning_rate import LearningRate, rule_for
from adaptive_batching.torchtune.noise_meter import NoiseMeter
from adaptive_batching.torchtune.probing import find_maximum

log = logging.getLogger(__name__)


@dataclass
class _Interval:
    """What this rank has run since the last decision."""

    samples: int = 0
    loss: float = 0.0
    """Sum over samples."""

    timed_steps: int = 0
    """All but the first of the run, which pays for what is set up once; what follows is of these."""

    timed_samples: int = 0
    forwards: int = 0
    tokens: int = 0
    """Padded."""

    seconds: float = 0.0


class Growth:
    """Makes loader, accumulation and learning rate of a recipe follow its course.

    Args:
        recipe: A recipe that has been set up.
        course: The batch sizes of the run.
        noise: What measures the gradient noise scale; None: it is not measured.
        stored: What :meth:`state_dict` gave in the run that is resumed.
    """

    def __init__(self, recipe: Any, course: Course, noise: NoiseMeter | None, stored: dict[str, Any]) -> None:
        self._recipe = recipe
        self.course = course
        self.noise = noise
        self.learning_rate = LearningRate(recipe)
        self._is_warm = False
        self._losses: list[float] = list(stored.get("losses", []))
        self._interval = _Interval(**stored.get("interval", {}))
        course.samples_seen, course.steps = stored.get("samples_seen", 0), recipe.global_step
        course.history = [(epoch, size) for epoch, size in stored.get("history", [])]
        if noise is not None and "noise_scale" in stored:
            noise.scale.load_state_dict(stored["noise_scale"])

    def start_epoch(self, number: int) -> Decision:
        """Settle on the size that an epoch starts with."""
        decision = self.course.start_epoch(number, self._observe)
        self._apply(decision)
        return decision

    def take_step(self, num_tokens: torch.Tensor) -> None:
        """The optimizer has taken a step, on ``num_tokens`` targets of all devices."""
        if self.noise is not None:
            shown = self.noise.step_done(num_tokens, self.course.window * self.course.shape.replicas)
            if shown is not None:
                self._recipe.report.noise(self._recipe.global_step + 1, shown, self.noise.scale.samples)
        self.learning_rate.advance(self.course.take_step())

    def step_done(self, loss: float, seconds: float, micro_batches: Sequence[MicroBatch]) -> Decision | None:
        """A step is over, with its record; returns what is decided for those that follow, if anything is."""
        interval = self._interval
        interval.samples += self.course.window
        interval.loss += loss * self.course.window
        if self._is_warm:
            interval.timed_steps += 1
            interval.timed_samples += self.course.window
            interval.forwards += len(micro_batches)
            interval.tokens += sum(micro_batch.tokens for micro_batch in micro_batches)
            interval.seconds += seconds
        self._is_warm = True
        decision = self.course.decide_if_due(self._observe)
        if decision is not None:
            self._apply(decision)
        return decision

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint is to hold."""
        return {
            "samples_seen": self.course.samples_seen,
            "history": [list(change) for change in self.course.history],
            "losses": self._losses,
            "interval": dataclasses.asdict(self._interval),
            **({} if self.noise is None else {"noise_scale": self.noise.scale.state_dict()}),
        }

    def _apply(self, decision: Decision) -> None:
        recipe, course = self._recipe, self.course
        course.controller.announce(decision)
        recipe._dataloader.set_batch_size(decision.batch_size)
        recipe._gradient_accumulation_steps = course.accumulation
        recipe._steps_per_epoch = course.steps_per_epoch
        self.learning_rate.set_scale(course.lr_scale)
        if decision.batch_size != decision.previous and not course.controller.decides_early:
            log.info("about %d optimizer steps are left, if the size stays", course.steps_left())

    def _observe(self) -> dict[str, Any]:
        interval, noise = self._interval, self.noise
        seconds_per_step = self._seconds_per_step(interval)
        if interval.samples:
            self._losses.append(interval.loss / interval.samples)
        self._interval = _Interval()
        return {
            "losses": tuple(self._losses),
            "noise_scale": None if noise is None else noise.scale.samples,
            "seconds_per_step": seconds_per_step,
        }

    def _seconds_per_step(self, interval: _Interval) -> Callable[[int], float] | None:
        """Seconds of an optimizer step as a function of the batch size, or None.

        The time of a step is a fixed part, for the optimizer, and the forwards and backwards, each with a fixed part of
        its own and a part for its tokens.
        """
        line = self._recipe.forward_cost.line()
        if line is None or interval.timed_steps == 0:
            return None
        per_forward, per_token = line
        tokens_per_sample = interval.tokens / interval.timed_samples
        tokens_per_forward = interval.tokens / interval.forwards
        in_forwards = interval.forwards * per_forward + interval.tokens * per_token
        fixed = max(interval.seconds - in_forwards, 0.0) / interval.timed_steps
        micro_batch_size = self._recipe.settings.micro_batch_size or self._recipe.samples_per_forward

        def seconds_at(batch_size: int) -> float:
            window = self.course.shape.window(batch_size)
            if micro_batch_size == "auto":
                forwards = math.ceil(window * tokens_per_sample / tokens_per_forward)
            else:
                batches = self.course.shape.accumulation_at(batch_size)
                forwards = batches * math.ceil(batch_size / (micro_batch_size or batch_size))
            seconds: float = fixed + forwards * per_forward + window * tokens_per_sample * per_token
            return seconds

        return seconds_at


def make_controller(recipe: Any, cfg: DictConfig) -> BatchController:
    """Find the maximum, and what decides within it."""
    settings = recipe.settings
    maximum, reason = find_maximum(recipe, cfg)
    divides = None
    if settings.keep_global_batch:
        divides = recipe.reference_batch_size * recipe.reference_accumulation
        maximum = largest_divisor(divides, at_most=maximum)
    if recipe.increase is None:
        start = maximum if settings.use_maximum_batch_size else int(cfg.batch_size)
        maximum = start
        if start != cfg.batch_size:
            log.info("batch size %d -> %d (%s)", cfg.batch_size, start, reason)
    else:
        start = _size_before_this_run(recipe, cfg)
        if recipe.stored and recipe.stored["maximum"] != maximum:
            log.info("the maximum was %d in the run that is resumed; now it is %d", recipe.stored["maximum"], maximum)
        if divides is not None:
            start = largest_divisor(divides, at_most=start)  # a stored one may be of another accumulation
        if start > maximum:
            log.warning("batch size %d is above the maximum %d (%s); starting at %d", start, maximum, reason, maximum)
            start = maximum
        elif settings.use_maximum_batch_size:
            log.info("batch size starts at %d and grows to at most %d (%s)", start, maximum, reason)
    # One rank alone is asked: a function that is random or keeps a state cannot split them.
    return BatchController(
        start, maximum, reason, recipe.increase, recipe.increase_name, divides, recipe.ranks.on_first
    )


def make_growth(recipe: Any, cfg: DictConfig, controller: BatchController) -> Growth:
    """Lay the run out."""
    settings = recipe.settings
    reference = recipe.reference_batch_size * recipe.reference_accumulation
    shape = RunShape(
        epochs=recipe.total_epochs,
        samples=len(recipe._dataloader.sampler),
        accumulation=recipe._gradient_accumulation_steps,
        replicas=recipe.num_replicas,
        max_steps=recipe.max_steps_per_epoch,
        decisions=settings.decisions_per_epoch,
        reference_steps=recipe.reference_steps_per_epoch,
        reference_samples=reference,
        kept_samples=reference if settings.keep_global_batch else None,
    )
    rule = rule_for(settings.lr_scaling, recipe)
    course = Course(
        controller,
        shape,
        recipe.rates,
        lambda window: learning_rate_scale(rule, window / reference, settings.max_lr_scale),
        initial_batch_size=min(int(cfg.batch_size), controller.maximum),
        grows_in_warmup=settings.grow_during_warmup,
    )
    every = recipe.noise_scale_every
    noise = None if every is None else NoiseMeter(recipe, every)
    return Growth(recipe, course, noise, recipe.stored.get("growth", {}))


def _size_before_this_run(recipe: Any, cfg: DictConfig) -> int:
    """The batch size that the next increase adds to: the stored one on resume, unless the user has changed it."""
    stored = recipe.stored.get("batch_size")
    if stored is None:
        return int(cfg.batch_size)
    if recipe.stored["configured_batch_size"] != cfg.batch_size:
        log.info(
            "batch_size=%d was %d in the run that is resumed; starting from %d, not from its last size %d",
            cfg.batch_size, recipe.stored["configured_batch_size"], cfg.batch_size, stored,
        )  # fmt: skip
        return int(cfg.batch_size)
    return int(stored)
