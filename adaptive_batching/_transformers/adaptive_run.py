"""A run of ``Trainer`` with our behaviour: what it found before training, and what it follows while it trains."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._growth.increase import resolve
from adaptive_batching._growth.learning_rate_scale import learning_rate_scale
from adaptive_batching._out_of_memory import is_out_of_memory
from adaptive_batching._probe.does_not_fit import DoesNotFitError
from adaptive_batching._probe.find import ProbeRequest
from adaptive_batching._probe.sizes import ProbeResult
from adaptive_batching._ranks.agree import Ranks
from adaptive_batching._transformers.course import Course, Length, growing_sizes, plan_course
from adaptive_batching._transformers.evaluation_in_parts import EvaluationInParts
from adaptive_batching._transformers.handed_out import Sample, Samples, length_function
from adaptive_batching._transformers.loss_kind import find_loss_kind
from adaptive_batching._transformers.refusals import check_data, check_loader, check_trainer
from adaptive_batching._transformers.sharded import shard
from adaptive_batching._transformers.step_in_parts import StepInParts
from adaptive_batching._transformers.trainer_probe import probe
from adaptive_batching._values import ByLength, ConfigError, Explore, Fixed, Whole

log = logging.getLogger(__name__)

FILE = "adaptive_batching.json"
"""Name of the file that a checkpoint gets in addition to what ``Trainer`` saves."""

_TO_MEASURE = 32  # samples from the start of the data among which some are run to know the loss


class AdaptiveRun:
    """The adaptive part of a training run, available as ``trainer.adaptive``."""

    def __init__(self, trainer: Any, settings: AdaptiveBatchingConfig) -> None:
        check_trainer(trainer)
        check_data(trainer)
        self.settings = settings
        self.course: Course | None = None
        """Batch size and steps of each epoch; None before training."""

        self.probe: ProbeResult | None = None
        """The largest forward, with every measurement; None if none was looked for, or before training."""

        self.step: StepInParts | None = None
        self.evaluation = EvaluationInParts(trainer)
        self.ranks = Ranks(trainer.args.device)
        self.is_sharded = bool(trainer.is_fsdp_enabled)
        self._trainer = trainer
        self._configured = int(trainer.args.per_device_train_batch_size)
        self._increase = None if not settings.grows else resolve(settings.batch_increase_function or "")[1]
        self._found: dict[str, int] = {}  # by a probe, of this run or the one that is resumed
        self._samplers: list[Any] = []

    @property
    def num_recoveries(self) -> int:
        """Number of times that samples of a step have had to run again."""
        return 0 if self.step is None else self.step.retry.limit.num_recoveries

    @property
    def max_tokens(self) -> int | None:
        """Padded tokens that a forward holds at most with ``micro_batch_size="auto"``."""
        return self._found.get("max_tokens")

    def resume_from(self, checkpoint: Path) -> None:
        """Take what the run that is resumed has found, rather than to look for it again."""
        if (checkpoint / FILE).is_file():
            self._found = json.loads((checkpoint / FILE).read_text())

    def save(self, checkpoint: Path) -> None:
        (checkpoint / FILE).write_text(json.dumps(self._found))

    def prepare(self, make_loader: Callable[[], Any]) -> Any:
        """Find what there is to find before training, and return the training data's loader."""
        trainer, loader = self._trainer, make_loader()
        self._samplers = check_loader(trainer, loader)
        samples = [self._sample(loader, index) for index in range(min(len(loader.dataset), _TO_MEASURE))]
        length = length_function(samples[0], getattr(trainer.data_collator, "max_length", None))
        self._make_step(samples, length)
        self._look_for_sizes(loader, length)
        loader = make_loader()  # a probe has made Accelerate forget the first
        self._samplers = check_loader(trainer, loader)
        self.start_epoch(0)
        return loader

    def _make_step(self, samples: list[Sample], length: Callable[[Sample], int] | None) -> None:
        """Find out what the loss is, and make the step that is right for it."""
        trainer, settings, size = self._trainer, self.settings, self.settings.micro_batch_size
        assert not isinstance(size, Explore)  # is refused
        try:
            if self.is_sharded:
                shard(trainer)
            kind = find_loss_kind(trainer, samples)
            trainer.loss_is_scaled_for_ga = kind.takes_number
            self.step = StepInParts(trainer, kind, size, length, self.ranks, recovers=settings.recover_from_oom)
            self.step.get_ready(samples)
            if isinstance(size, (Fixed, ByLength)):
                self.step.check_that_parts_add_up(samples)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise DoesNotFitError(
                "out of memory in a forward of a few short samples, before training; nothing larger will fit. What "
                "takes less: gradient_checkpointing=True, bf16=True, LoRA"
            ) from error

    def start_epoch(self, epoch: int) -> None:
        assert self.course is not None
        self._set_size(self.course.sizes[min(epoch, len(self.course.sizes) - 1)])

    def follow(self, scheduler: Any) -> Any:
        """Return the schedule as it is to be for batches of other sizes than configured: one of samples."""
        course, rule = self.course, self.settings.lr_scaling
        if course is None or course.is_as_configured:
            return scheduler
        if not isinstance(scheduler, LambdaLR):
            if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) and rule == "none":
                return scheduler
            raise ConfigError(
                f"{type(scheduler).__name__} is no function of the step, so that it cannot follow batches of other "
                f"sizes; take a schedule of transformers, such as lr_scheduler_type='linear', and lr_scaling='none'"
            )
        optimizer = scheduler.optimizer
        unwrapped = getattr(optimizer, "optimizer", optimizer)

        def at(step: int, rate: Callable[[Any], float]) -> float:
            growth = course.size_at(step) / course.reference_size
            scale = learning_rate_scale(rule, unwrapped, growth, self.settings.max_lr_scale)
            return rate(course.scheduled(step)) * scale

        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"]
        return LambdaLR(optimizer, [functools.partial(at, rate=rate) for rate in scheduler.lr_lambdas])

    def _sample(self, loader: Any, index: int) -> Sample:
        found = loader.collate_fn([loader.dataset[index]])
        assert isinstance(found, Samples)
        return found.features[0]

    def _set_size(self, size: int) -> None:
        for sampler in self._samplers:
            sampler.batch_size = size
        self._trainer._train_batch_size = size

    def _look_for_sizes(self, loader: Any, length: Callable[[Sample], int] | None) -> None:
        settings, args = self.settings, self._trainer.args
        samples = -(-len(loader.dataset) // args.world_size)
        accumulated = int(args.gradient_accumulation_steps)
        in_one_forward = isinstance(settings.micro_batch_size, Whole)
        most = max(min(settings.max_batch_size or samples, samples // accumulated), 1)
        configured = min(self._configured, samples)
        if in_one_forward and settings.probes and "maximum" not in self._found:
            found = self._probe(loader, length, most, in_parts=accumulated > 1)
            self._found["maximum"] = found.batch_size
        maximum = self._found.get("maximum", most)
        start = maximum if settings.use_maximum_batch_size else configured
        if start > maximum:
            raise (
                ConfigError(
                    f"per_device_train_batch_size={start} is more than fits, which is {maximum}; lower it, or set "
                    f"use_maximum_batch_size=True or micro_batch_size='auto'"
                )
                if in_one_forward and settings.probes
                else ConfigError(
                    f"per_device_train_batch_size={start} is more than the data have for a step, {maximum}; lower it"
                )
            )
        sizes = growing_sizes(start, maximum, self._increase, samples)

        def batches_of(size: int) -> int:
            self._set_size(size)
            return max(len(loader), 1)

        length_of_run = Length(args.num_train_epochs, args.max_steps)
        self.course = plan_course(sizes, batches_of, accumulated, length_of_run, configured)
        if isinstance(settings.micro_batch_size, ByLength):
            if "max_tokens" not in self._found:
                upper = max(self.course.sizes) * accumulated
                longest = dataclasses.replace(settings, round_to_power_of_two=False)
                found = self._probe(loader, length, upper, in_parts=True, settings=longest)
                self._found["max_tokens"] = found.batch_size * self._longest(loader, length)[0]
            assert self.step is not None
            self.step.max_tokens = self._found["max_tokens"]

    def _probe(
        self, loader: Any, length: Callable[[Sample], int] | None, upper: int, *, in_parts: bool,
        settings: AdaptiveBatchingConfig | None = None,
    ) -> ProbeResult:  # fmt: skip
        tokens, sample = self._longest(loader, length)
        settings = settings or self.settings
        include = None if settings.micro_batch_size != Whole() else min(self._configured, upper)
        request = ProbeRequest(
            upper, "samples of a step", include=include, coarse=not settings.round_to_power_of_two, ranks=self.ranks,
            scratch=Path(self._trainer.args.output_dir),
        )  # fmt: skip
        assert self.step is not None
        self.probe = probe(self._trainer, self.step, sample, settings, request, in_parts=in_parts)
        self.step.retry.limit.note(self.probe.batch_size * tokens)
        return self.probe

    def _longest(self, loader: Any, length: Callable[[Sample], int] | None) -> tuple[int, Sample]:
        """Return the tokens of the longest sample of the data, and the sample; 1 and the first if they are unknown."""
        if length is None:
            return 1, self._sample(loader, 0)
        tokens, index = max((length(loader.dataset[index]), -index) for index in range(len(loader.dataset)))
        return tokens, self._sample(loader, -index)


class FollowingCallback(TrainerCallback):
    """Gives each epoch its batch size, and tells how much of it is over."""

    def __init__(self, run: AdaptiveRun) -> None:
        self._run = run
        self._epoch = self._steps = 0

    def start_at(self, epoch: int, steps: int) -> None:
        self._epoch, self._steps = epoch - 1, steps

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._epoch += 1
        self._run.start_epoch(self._epoch)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Trainer takes all epochs to have as many steps.
        self._steps += 1
        assert self._run.course is not None
        state.epoch = self._epoch + self._run.course.part_of(self._epoch, self._steps)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._steps = 0

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._run.save(Path(args.output_dir) / f"checkpoint-{state.global_step}")
