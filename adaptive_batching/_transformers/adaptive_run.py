"""A run of ``Trainer`` with our behaviour: what it found before training, and what it follows while it trains."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import operator
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._device import RandomState
from adaptive_batching._growth.batch_size_schedule import PlannedEpoch
from adaptive_batching._growth.controller import KeepGlobal
from adaptive_batching._growth.increase import resolve
from adaptive_batching._growth.learning_rate_scale import learning_rate_scale
from adaptive_batching._loop.samples import collated
from adaptive_batching._memory import memory_meter
from adaptive_batching._out_of_memory import is_out_of_memory
from adaptive_batching._probe.does_not_fit import DoesNotFitError, memory_budget
from adaptive_batching._probe.find import ProbeRequest
from adaptive_batching._probe.found import Found, read_stored, taken_again
from adaptive_batching._probe.sizes import ProbeResult
from adaptive_batching._ranks.agree import Ranks
from adaptive_batching._report.summary import lines_of_probe, named, table_of_plan
from adaptive_batching._step.split import FORWARD_COST
from adaptive_batching._transformers.before_training import BeforeTraining, begin_to_train
from adaptive_batching._transformers.conditions import conditions_of
from adaptive_batching._transformers.course import Course, Length, growing, plan_course
from adaptive_batching._transformers.evaluation_in_parts import EvaluationInParts
from adaptive_batching._transformers.handed_out import (
    PairLength,
    Sample,
    count_numbers,
    handing_out_samples,
    has_decoder,
    length_function,
    reading,
)
from adaptive_batching._transformers.loss_kind import find_loss_kind
from adaptive_batching._transformers.refusals import check_data, check_loader, check_trainer
from adaptive_batching._transformers.sharded import shard
from adaptive_batching._transformers.step_in_parts import StepInParts
from adaptive_batching._transformers.trainer_probe import probe
from adaptive_batching._values import ByLength, ConfigError, Explore, Fixed, Whole

log = logging.getLogger(__name__)

FILE = "adaptive_batching.json"
"""Name of the file that a checkpoint gets in addition to what ``Trainer`` saves."""

_TO_MEASURE = 32  # samples of which some are run to know the loss


class AdaptiveRun:
    """The adaptive part of a training run, available as ``trainer.adaptive``; printed, what it has found."""

    def __init__(self, trainer: Any, settings: AdaptiveBatchingConfig, given: Mapping[str, Any]) -> None:
        check_trainer(trainer)
        check_data(trainer)
        self.settings = settings
        self.given = given
        """The settings as they were given."""

        self.course: Course | None = None
        """Batch size and steps of each epoch; None before training."""

        self.probe: ProbeResult | None = None
        """The largest forward, with every measurement; None if none was looked for, or before training."""

        self.maximum: tuple[int, str] | None = None
        """The largest batch on a device, and what bounds it; None before training."""

        self.longest: int | None = None
        """Tokens of the longest sample; None if they are unknown, or nothing was probed."""

        self.is_text = False
        """True if the tokens of samples are known, which those of images are not."""

        self.waited = 0.0
        """Seconds that this run has spent on the probe."""

        self.only_finds = False
        """True while ``train`` runs to find what it would train with."""

        self.begins = False
        """True from the call of ``train`` until its loader is there."""

        self.step: StepInParts | None = None
        self.evaluation = EvaluationInParts(trainer)
        self.ranks = Ranks(trainer.args.device)
        self._trainer = trainer
        self._configured = int(trainer.args.per_device_train_batch_size)
        self._increase = resolve(settings.batch_increase_function) if settings.batch_increase_function else ("", None)
        self._samples = 0  # of the training data
        self._in_forward: int | None = None  # samples, where the batch stays as it is and its forwards do not
        self._found: Found | None = None  # by a probe, of this run, the one before or the one that is resumed
        self._stays = False  # True for what is to be trained with, although more might fit by now
        self._goes_on = False  # True for what a checkpoint has, until training goes on
        self._extremes: tuple[Any, Any] | None = None  # of some data and their collator
        self._resumed = ""  # checkpoint that the run goes on from
        self._devices_before: int | None = None  # of the run that is resumed
        self._prepared_for: list[Any] = []
        self._samplers: list[Any] = []

    @property
    def num_recoveries(self) -> int:
        """Number of times that samples of a step have had to run again."""
        return 0 if self.step is None else self.step.limit.num_recoveries

    @property
    def max_tokens(self) -> int | None:
        """Padded tokens that a forward holds at most with ``micro_batch_size="auto"``."""
        by_length = isinstance(self.settings.micro_batch_size, ByLength)
        return self._found.samples * self._found.tokens if by_length and self._found is not None else None

    @property
    def batch_size(self) -> int:
        """Samples of a batch on a device, or of a forward with ``keep_global_batch``."""
        return self._in_forward or int(self._trainer._train_batch_size)

    @property
    def global_batch_size(self) -> int:
        """Samples of an optimizer step on all devices."""
        args = self._trainer.args
        return int(self._trainer._train_batch_size * args.gradient_accumulation_steps * args.world_size)

    def find(self) -> AdaptiveRun:
        """Find what fits, and the plan, as ``train`` does first, which then does not look for it again; return self.

        Printed, it tells both. Weights, random state, and the order of data stay as they are. With DDP, all processes
        call it. When training has begun, there is nothing left to find, until model, data or settings change.

        Raises:
            ConfigError: If the model is to be sharded, or on what training would raise it.
            DoesNotFitError: If not even a short sample fits.
        """
        is_new = self.course is None or self._prepared_for != self._what_to_prepare_for()
        if is_new and not self._trainer.is_in_train:
            self.only_finds = True
            try:
                begin_to_train(self._trainer)
            except BaseException:
                self.course = None
                raise
            finally:
                self.only_finds = False
            self._stays = True
        return self

    def planned(self, rate: Callable[[int], float] | None = None, after: int = 0) -> list[PlannedEpoch]:
        """Return what is left of each epoch after ``after`` steps of the run; arguments as for ``Course.planned``."""
        assert self.course is not None
        epochs = self.course.planned(self._samples, self.ranks.size, rate, after)
        for epoch in epochs:
            epoch.batch_sizes = [self._in_forward or size for size in epoch.batch_sizes]
        return epochs

    def __str__(self) -> str:
        told = ", ".join(f"{name}={value}" for name, value in self.given.items())
        if self.course is None:
            return f"{told}; what fits, and the plan, are found by find(), or when training begins"
        assert self.maximum is not None
        found = [("maximum batch size", f"{self.maximum[0]} ({self.maximum[1]})")]
        if self.probe is not None:
            found = lines_of_probe(self.probe, self.longest or 1, self.probed)
        epochs = self.planned()
        plan = [f"  {line}" for line in table_of_plan(epochs)]
        return "\n".join([told, *named(found), f"the plan: {sum(each.steps for each in epochs)} steps", *plan])

    @property
    def probed(self) -> str:
        """The size that a probe looks for, in words."""
        return "maximum batch size" if isinstance(self.settings.micro_batch_size, Whole) else "largest forward"

    def resume_from(self, checkpoint: Path) -> None:
        """Take what the run that is resumed has found, rather than to look for it again."""
        self._resumed, self._stays, self._goes_on = str(checkpoint), True, True
        path = checkpoint / FILE

        def read() -> tuple[Found | None, int]:
            values = json.loads(path.read_text())
            found = None if values["found"] is None else Found.from_dict(values["found"])
            return found, int(values["devices"])

        stored = self.ranks.on_first(lambda: read_stored(read, f"what is stored in {path}"))
        self._found, self._devices_before = stored or (None, None)

    def check_place(self, step: int, epoch: float) -> None:
        """Raise ConfigError unless ``epoch`` epochs are over after ``step`` steps in this run, too."""
        assert self.course is not None
        found, devices = self.course.epochs_after(step), self._trainer.args.world_size
        if not step or abs(epoch - found) <= 1e-6:
            return
        before = self._devices_before or devices
        if before != devices:
            accumulated = self._trainer.args.gradient_accumulation_steps * before / devices
            instead = f", or set gradient_accumulation_steps={accumulated:.0f}" if accumulated.is_integer() else ""
            raise ConfigError(
                f"resume_from_checkpoint={self._resumed!r} is of a run on {before} devices, and on {devices} a step "
                f"would have other samples; resume on {before}{instead}"
            )
        raise ConfigError(
            f"resume_from_checkpoint={self._resumed!r}: {epoch:.3f} epochs were over after step {step}, and would be "
            f"{found:.3f} with the batch sizes of this run; resume with the data, the devices, "
            f"per_device_train_batch_size and settings that it began with"
        )

    def save(self, checkpoint: Path) -> None:
        found = None if self._found is None else self._found.to_dict()
        (checkpoint / FILE).write_text(json.dumps({"devices": self._trainer.args.world_size, "found": found}))

    def prepare(self, loader: Any) -> None:
        """Find what there is to find before training on the batches of ``loader``, and set the size of the first.

        Random state stays as it is, and what Accelerate has been told of.

        Raises:
            ConfigError: If the loader, the data or the model cannot be trained this way.
            DoesNotFitError: If not even a short sample fits.
            BeforeTraining: If this is all that was to be done.
        """
        trainer, self.waited = self._trainer, 0.0
        self._configured = int(trainer.args.per_device_train_batch_size)
        resizes = self.settings.use_maximum_batch_size or self.settings.batch_increase_function is not None
        self._samplers = check_loader(trainer, loader, self._configured, resizes=resizes)
        self._samples = self._drawn(loader)
        known = trainer.accelerator._dataloaders
        with reading(loader.dataset, trainer.args.device):
            count = len(loader.dataset)
            few = min(count, _TO_MEASURE)
            samples = [self._sample(loader, number * count // few) for number in range(few)]  # from all of the data
            length = self._length(loader, samples[0])
        self.is_text = length is not None
        self._make_step(samples, length)
        self._look_for_sizes(loader, length)
        self._prepared_for = self._what_to_prepare_for()
        if self.probe is not None and self.step is not None:
            self.step.limit.note(self.probe.batch_size * (self.longest or 1))
        if self._in_forward is not None and self.step is not None:
            self.step.size = Fixed(self._in_forward)
            self.step.check_that_parts_add_up()
        trainer.accelerator._dataloaders = known  # a probe has made Accelerate forget them
        self.start_epoch(0)
        if self.only_finds:
            raise BeforeTraining

    def _make_step(self, samples: list[Sample], length: Callable[[Sample], int] | None) -> None:
        """Find out what the loss is, and make the step that is right for it."""
        trainer, settings, size = self._trainer, self.settings, self.settings.micro_batch_size
        assert not isinstance(size, Explore)  # is refused
        try:
            if trainer.is_fsdp_enabled:
                shard(trainer)
            random_state = RandomState(trainer.args.device)  # from which a collate function may draw
            kind, module = find_loss_kind(trainer, samples, self.ranks)
            trainer.loss_is_scaled_for_ga = kind.takes_number
            self.step = StepInParts(
                trainer, kind, size, length, self.ranks, dependent_module=module, recovers=settings.recover_from_oom,
                audit_every=settings.audit_every,
            )  # fmt: skip
            self.step.get_ready(samples)
            random_state.put_back()
            if isinstance(size, (Fixed, ByLength)):
                self.step.check_that_parts_add_up()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise DoesNotFitError.even_of_few("gradient_checkpointing=True, bf16=True, LoRA") from error

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

    def _drawn(self, loader: Any) -> int:
        """Return the samples that all devices draw in an epoch, which may be others than the data has."""
        innermost, is_shared = self._samplers[-1], len(self._samplers) > 1
        sampler: Any = getattr(innermost, "sampler", None)
        if not hasattr(sampler, "__len__"):
            return len(loader.dataset)
        return len(sampler) * (1 if is_shared else int(self._trainer.args.world_size))

    def _sample(self, loader: Any, index: int) -> Sample:
        of_samples = handing_out_samples(loader, self._trainer.data_collator)
        return of_samples.collate_fn([loader.dataset[index]]).features[0]

    def _length(self, loader: Any, sample: Sample) -> Callable[[Sample], int] | None:
        trainer = self._trainer
        targets = has_decoder(trainer.model)
        length = length_function(sample, getattr(trainer.data_collator, "max_length", None), targets=targets)
        if length is not None and targets and {"input_ids", "labels"} <= sample.keys():
            return PairLength(loader.dataset, functools.partial(self._sample, loader))
        return length

    def _set_size(self, size: int) -> None:
        for sampler in self._samplers:
            sampler.batch_size = size
        self._trainer._train_batch_size = size

    def _look_for_sizes(self, loader: Any, length: Callable[[Sample], int] | None) -> None:
        settings, args = self.settings, self._trainer.args
        self.probe, self.longest = None, None
        samples = -(-self._samples // args.world_size)
        accumulated = int(args.gradient_accumulation_steps)
        most, reason = self._upper_bound(samples, accumulated)
        self.maximum = most, reason
        configured = min(self._configured, samples)
        if isinstance(settings.micro_batch_size, Whole) and settings.probes:
            found = self._find(loader, length, (most, reason), in_parts=accumulated > 1).result
            most = found.batch_size
            self.maximum = most, found.bound
        start = most if settings.use_maximum_batch_size else configured
        if settings.keep_global_batch and settings.use_maximum_batch_size:
            start, self._in_forward = configured, KeepGlobal(configured * accumulated).allowed(most)
        elif start > most:
            raise ConfigError(
                f"per_device_train_batch_size={start} is more than fits, which is {most}; lower it, or set "
                "use_maximum_batch_size=True or micro_batch_size='auto'"
            )

        def batches_of(size: int) -> int:
            self._set_size(size)
            return max(len(loader), 1)

        name, increase = self._increase
        decide = growing(start, most, name, increase, samples)
        length_of_run = Length(args.num_train_epochs, args.max_steps)
        self.course = plan_course(decide, batches_of, accumulated, length_of_run, configured)
        if isinstance(settings.micro_batch_size, ByLength):
            upper = max(self.course.sizes) * accumulated, "the samples of an optimizer step"
            longest = dataclasses.replace(settings, round_to_power_of_two=False)
            cost = self._find(loader, length, upper, in_parts=True, settings=longest).forward_cost
            assert self.step is not None
            self.step.max_tokens = self.max_tokens
            self.step.forward_cost = FORWARD_COST if cost is None else cost

    def _upper_bound(self, samples: int, accumulated: int) -> tuple[int, str]:
        """Return the largest batch that the settings and the data allow, and which of them bounds it."""
        settings = self.settings
        most, reason = max(samples // accumulated, min(self._configured, samples)), f"{samples} samples of data"
        if settings.keep_global_batch:
            most, reason = self._configured * accumulated, "the global batch, which is kept"
        if settings.max_batch_size is not None and settings.max_batch_size <= most:
            most, reason = settings.max_batch_size, f"max_batch_size={settings.max_batch_size}"
        return most, reason

    def _find(
        self, loader: Any, length: Callable[[Sample], int] | None, bound: tuple[int, str], *, in_parts: bool,
        settings: AdaptiveBatchingConfig | None = None,
    ) -> Found:  # fmt: skip
        """Return the largest forward that fits: what was found before, where it still holds, or else of a probe."""
        settings, ranks, (upper, _) = settings or self.settings, self.ranks, bound
        size = settings.micro_batch_size
        include = min(self._configured, upper) if isinstance(size, Whole) else None
        meter = memory_meter(self._trainer.args.device)
        # To go on, all lengths are not read again: with other data, check_place refuses.
        of_checkpoint = self._found if self._goes_on else None
        tokens = of_checkpoint.tokens if of_checkpoint else self._find_extremes(loader, length)[0]
        facts = {"samples": self._samples, "longest": tokens, "include": include, "in_parts": in_parts}
        now = conditions_of(self._trainer, settings, facts, meter, ranks.size)
        available = int(ranks.smallest(memory_budget(settings, meter)))
        source = f"the probe of {self._resumed}" if of_checkpoint else "this trainer's probe"
        stays = self._stays
        held = ranks.on_first(lambda: taken_again(self._found, now, upper, available, stays=stays, source=source))
        if held is None:
            result = self._probe(loader, length, bound, include, in_parts=in_parts, settings=settings)
            tokens = self._find_extremes(loader, length)[0]
            now = dataclasses.replace(now, run={**now.run, "longest": tokens})
            cost = self._forward_cost(tokens) if isinstance(size, ByLength) else None
            held = Found(result, now, upper, tokens, cost)
        self._found, self._stays, self._goes_on = held, False, False
        self.probe, self.longest = held.result, None if length is None else held.tokens
        return held

    def _what_to_prepare_for(self) -> list[Any]:
        """Return what a run depends on, to compare; the model as a reference, which does not keep it alive."""
        trainer = self._trainer
        return [weakref.ref(trainer.model), id(trainer.train_dataset), trainer.args.to_dict(), self.settings]

    def _probe(
        self, loader: Any, length: Callable[[Sample], int] | None, bound: tuple[int, str], include: int | None, *,
        in_parts: bool, settings: AdaptiveBatchingConfig,
    ) -> ProbeResult:  # fmt: skip
        upper, reason = bound
        start = time.perf_counter()
        tokens, mean, extremes = self._find_extremes(loader, length)
        assert self.step is not None
        # Where the batch stays as it is, and is only split, forwards need be no larger than is of use.
        times = None
        if isinstance(settings.micro_batch_size, ByLength):
            assert self.course is not None
            times = self.step.times
            times.samples_left = sum(each.samples for each in self.planned()) / self.ranks.size * mean / tokens
        request = ProbeRequest(
            upper, reason, include=include, coarse=not settings.round_to_power_of_two, times=times, ranks=self.ranks,
            scratch=Path(self._trainer.args.output_dir),
        )  # fmt: skip
        result = probe(self._trainer, self.step, extremes, settings, request, in_parts=in_parts)
        self.waited = time.perf_counter() - start
        return result

    def _forward_cost(self, tokens: int) -> int | None:
        """Return the fixed time of a forward in tokens of the slowest rank, if the probe has told it on all."""
        assert self.step is not None
        samples = self.step.times.in_samples()
        known = self.ranks.all(samples is not None)
        return round(self.ranks.largest(samples or 0.0) * tokens) if known else None

    def _find_extremes(
        self, loader: Any, length: Callable[[Sample], int] | None
    ) -> tuple[int, float, tuple[Sample, Sample]]:
        """Return the tokens of the longest sample and their mean, and the longest and the shortest sample.

        If lengths are unknown, these are 1, and the samples of most and of fewest numbers among some.
        """
        read = self._trainer.train_dataset, self._trainer.data_collator
        if self._extremes is not None and all(map(operator.is_, self._extremes[0], read)):
            return self._extremes[1]  # type: ignore[no-any-return]
        with reading(loader.dataset, self._trainer.args.device):
            if length is None:
                some = [self._sample(loader, index) for index in range(min(len(loader.dataset), _TO_MEASURE))]
                by_size = sorted(some, key=lambda each: count_numbers(collated([each], self._trainer.data_collator)))
                found = 1, 1.0, (by_size[-1], by_size[0])
            else:
                by_length = [(length(loader.dataset[index]), index) for index in range(len(loader.dataset))]
                (tokens, longest), (_, shortest) = max(by_length, key=lambda each: each[0]), min(by_length)
                mean = sum(tokens for tokens, _ in by_length) / len(by_length)
                found = tokens, mean, (self._sample(loader, longest), self._sample(loader, shortest))
                if isinstance(length, PairLength):
                    found = length(length.longest), mean, (length.longest, found[2][1])
        self._extremes = read, found
        return found


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
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and checkpoint.is_dir():
            self._run.save(checkpoint)

    on_push_begin = on_save  # an upload of the checkpoint begins before it is told that one was saved
