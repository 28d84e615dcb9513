"""The batch size while training: its course followed, and the observations that decisions need gathered."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from adaptive_batching._device import unchanged_random_state
from adaptive_batching._growth.controller import Decision
from adaptive_batching._growth.course import Course
from adaptive_batching._growth.noise_scale import NoiseEstimate
from adaptive_batching._torchtune.cutting import Execution, MicroBatch
from adaptive_batching._torchtune.data import Sample
from adaptive_batching._torchtune.host import Host, StockRun
from adaptive_batching._torchtune.learning_rate import LearningRate
from adaptive_batching._torchtune.noise_meter import NoiseMeter
from adaptive_batching._torchtune.second_moment import SecondMoment
from adaptive_batching._values import ByLength

log = logging.getLogger(__name__)


@dataclass
class _Interval:
    """Sums on this rank since the last decision."""

    samples: int = 0
    loss: float = 0.0
    """Sum over samples."""

    val_loss: float | None = None
    """Of the last validation."""

    timed_steps: int = 0
    """All steps but the first of the run, which pays for one-time set-up. The fields below count these alone."""

    timed_samples: int = 0
    forwards: int = 0
    tokens: int = 0
    """Padded."""

    seconds: float = 0.0


class Growth:
    """Makes loader and learning rate follow the course of a run, and Adam's beta2 unless ``second_moment`` is None.

    ``noise`` is None for no measurement. ``stored`` is the :meth:`state_dict` of the run that is resumed, or empty.
    """

    def __init__(
        self,
        host: Host,
        run: StockRun,
        course: Course,
        execution: Execution,
        noise: NoiseMeter | None,
        second_moment: SecondMoment | None,
        stored: Mapping[str, Any],
    ) -> None:
        self.course = course
        self.noise = noise
        self.learning_rate = LearningRate(run.scheduler, host.optimizers)
        self._second_moment = second_moment
        self._configured_window = run.window
        self._loader = host.loader
        self._device = host.device
        self._execution = execution
        self._is_warm = False
        self._losses: list[float] = list(stored.get("losses", []))
        self._val_losses: list[float] = list(stored.get("val_losses", []))
        self._interval = _Interval(**stored.get("interval", {}))
        course.samples_seen, course.steps = stored.get("samples_seen", 0), run.first_step
        course.history = [(epoch, size) for epoch, size in stored.get("history", [])]
        within_epoch = stored.get("within_epoch")
        self._resumes_epoch = within_epoch is not None
        if within_epoch is not None:
            self.learning_rate.advance(course.resume(run.first_epoch, within_epoch))
        if noise is not None and "noise_scale" in stored:
            noise.scale.load_state_dict(stored["noise_scale"])

    @property
    def global_batch_size(self) -> int:
        """Samples that the optimizer sees in a step."""
        return self.course.window * self.course.shape.replicas

    def start_epoch(self, number: int) -> Decision | None:
        """Decide on the size that an epoch starts with; None for one that is resumed, whose size is known."""
        if self._resumes_epoch:
            self._resumes_epoch = False
            course = self.course
            seen, samples = course.seen_in_epoch, course.shape.samples
            log.info(
                "epoch %d goes on after %d of %d samples; batch size %d",
                number,
                seen,
                samples,
                course.controller.batch_size,
            )
            self._follow()
            return None
        decision = self.course.start_epoch(number, self._observe)
        self._apply(decision)
        return decision

    def batches(self) -> Iterator[list[Sample]]:
        """Return the batches of this epoch that are left."""
        if not self.course.seen_in_epoch:
            return iter(self._loader)
        if self.course.epoch_is_over:  # as another batch size leaves no room for a step
            return iter(())
        with unchanged_random_state(self._device):  # a new iterator draws a number, and this one is not new
            return self._loader.iter_from(self.course.seen_in_epoch)

    def take_step(self, num_tokens: torch.Tensor) -> NoiseEstimate | None:
        """Move course and schedule by a step on ``num_tokens`` targets of all devices; return its noise if measured."""
        shown = None if self.noise is None else self.noise.estimate(num_tokens, self.global_batch_size)
        self.learning_rate.advance(self.course.take_step())
        return shown

    def record_step(self, loss: float, seconds: float, micro_batches: Sequence[MicroBatch]) -> Decision | None:
        """Take note of a step that is over, and return what is decided for those that follow, if anything is."""
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

    def note_validation(self, loss: float) -> None:
        """Take note of the loss of a validation, before :meth:`record_step` of the step that it follows."""
        self._interval.val_loss = loss

    @contextlib.contextmanager
    def unscaled(self) -> Iterator[None]:
        """Give the optimizers what a checkpoint holds, inside: the rate as scheduled, and beta2 as configured."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.learning_rate.unscaled())
            if self._second_moment is not None:
                stack.enter_context(self._second_moment.unscaled())
            yield

    def metrics(self) -> dict[str, float]:
        """Return what is logged in addition to stock's metrics."""
        metrics: dict[str, float] = {
            "batch_size_samples": self.course.controller.batch_size,
            "global_batch_size_samples": self.global_batch_size,
        }
        noise_scale = None if self.noise is None else self.noise.scale.samples
        return metrics if noise_scale is None else {**metrics, "gradient_noise_scale_samples": noise_scale}

    def state_dict(self) -> dict[str, Any]:
        return {
            "samples_seen": self.course.samples_seen,
            "within_epoch": self.course.progress(),
            "history": [list(change) for change in self.course.history],
            "losses": self._losses,
            "val_losses": self._val_losses,
            "interval": dataclasses.asdict(self._interval),
            **({} if self.noise is None else {"noise_scale": self.noise.scale.state_dict()}),
            **({} if self._second_moment is None else {"second_moment": self._second_moment.state_dict()}),
        }

    def _apply(self, decision: Decision) -> None:
        course = self.course
        course.controller.announce(decision)
        self._follow()
        if decision.batch_size != decision.previous and not course.controller.decides_early:
            log.info("about %d optimizer steps are left, if the size stays", course.steps_left())

    def _follow(self) -> None:
        self._loader.set_batch_size(self.course.controller.batch_size)
        self.learning_rate.set_scale(self.course.lr_scale)
        if self._second_moment is not None:
            self._second_moment.follow(self.course.window / self._configured_window)

    def _observe(self) -> dict[str, Any]:
        interval, noise = self._interval, self.noise
        seconds_per_step = self._seconds_per_step(interval)
        if interval.samples:
            self._losses.append(interval.loss / interval.samples)
        if interval.val_loss is not None:
            self._val_losses.append(interval.val_loss)
        self._interval = _Interval()
        return {
            "losses": tuple(self._losses),
            "val_losses": tuple(self._val_losses),
            "noise_scale": None if noise is None else noise.scale.samples,
            "seconds_per_step": seconds_per_step,
        }

    def _seconds_per_step(self, interval: _Interval) -> Callable[[int], float] | None:
        """Return seconds of an optimizer step as a function of the batch size, or None while that is not known.

        The time of a step is a fixed part, for the optimizer, and the forwards and backwards, each with a fixed part of
        its own and a part for its tokens.
        """
        line = self._execution.cost.line()
        if line is None or interval.timed_steps == 0:
            return None
        per_forward, per_token = line
        tokens_per_sample = interval.tokens / interval.timed_samples
        tokens_per_forward = interval.tokens / interval.forwards
        in_forwards = interval.forwards * per_forward + interval.tokens * per_token
        fixed = max(interval.seconds - in_forwards, 0.0) / interval.timed_steps
        accumulation = self.course.shape.accumulation
        by_length = isinstance(self._execution.size, ByLength)

        def seconds_at(batch_size: int) -> float:
            window = accumulation.window(batch_size)
            if by_length:
                forwards = math.ceil(window * tokens_per_sample / tokens_per_forward)
            else:
                per_batch = math.ceil(batch_size / (self._execution.most_samples or batch_size))
                forwards = accumulation.batches_at(batch_size) * per_batch
            seconds: float = fixed + forwards * per_forward + window * tokens_per_sample * per_token
            return seconds

        return seconds_at
