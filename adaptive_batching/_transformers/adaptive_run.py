"""A run of ``Trainer`` with our behaviour: what it found before training, and what it follows while it trains."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import IterableDataset
from transformers import TrainerCallback

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._device import unchanged_random_state
from adaptive_batching._growth.batch_size_schedule import PlannedEpoch
from adaptive_batching._growth.increase import AskedOnce, resolve
from adaptive_batching._growth.learning_rate_scale import learning_rate_scale
from adaptive_batching._loop.samples import collated
from adaptive_batching._memory.meter import memory_meter
from adaptive_batching._memory.out_of_memory import is_out_of_memory
from adaptive_batching._probe.does_not_fit import DoesNotFitError, memory_budget
from adaptive_batching._probe.sizes import ProbeResult
from adaptive_batching._probe.sizing import ProbeRequest, Sizes, Sizing, size_up
from adaptive_batching._probe.stored_probe import StoredProbe, read_stored, taken_again
from adaptive_batching._ranks.agree import Ranks
from adaptive_batching._report.summary import lines_of_probe, named, table_of_plan
from adaptive_batching._state import State, draws_put_back
from adaptive_batching._step.row_size import first_row
from adaptive_batching._transformers.before_training import get_ready
from adaptive_batching._transformers.conditions import conditions_of
from adaptive_batching._transformers.declared import state_of
from adaptive_batching._transformers.evaluation_in_parts import EvaluationInParts
from adaptive_batching._transformers.handed_out import PairLength, without_gathering
from adaptive_batching._transformers.loss_kind import LossKind, add_up_together, find_loss_kind
from adaptive_batching._transformers.refusals import check_batch_samples, check_data, check_trainer, rebalances
from adaptive_batching._transformers.sharded import shard
from adaptive_batching._transformers.step_in_parts import StepInParts
from adaptive_batching._transformers.step_plan import Length, StepPlan, growing, plan_steps
from adaptive_batching._transformers.streamed_data import StreamedData
from adaptive_batching._transformers.trainer_probe import probe
from adaptive_batching._transformers.training_data import TrainingData
from adaptive_batching._undeclared import reporting
from adaptive_batching._values import ByLength, ConfigError, Explore, Fixed, Whole

log = logging.getLogger(__name__)

_ENDLESS = 1 << 40  # samples of a stream whose end is not known
_LOOKED_AT, _TOGETHER = 3, 7  # batches of which each is looked at, and of which samples run together

FILE = "adaptive_batching.json"
"""Name of the file that a checkpoint gets in addition to what ``Trainer`` saves."""


@dataclasses.dataclass(frozen=True)
class Known:
    """What was found before: by this trainer, or by the run that is resumed."""

    stored: StoredProbe | None = None
    is_resumed: bool = False  # it comes from a checkpoint, from which training has not yet gone on
    checkpoint: str = ""
    devices: int | None = None  # of the run that is resumed
    global_batch_size: int | None = None  # samples of its last step
    longest_pair: tuple[int, int] | None = None  # of its data
    cut_short: tuple[int, int, list[int]] | None = None
    """Of a resumed run that has ended epochs early: epochs that are over, steps of the next, and the steps of each."""


class AdaptiveRun:
    """The adaptive part of a training run, available as ``trainer.adaptive``; printed, what it has found."""

    def __init__(
        self, trainer: Any, settings: AdaptiveBatchingConfig, given: Mapping[str, Any], listed: Sequence[Any] = ()
    ) -> None:
        check_trainer(trainer)
        balances_ranks = settings.balance_ranks and isinstance(settings.micro_batch_size, ByLength)
        check_data(trainer, balances_ranks=balances_ranks and trainer.args.world_size > 1, grows=settings.grows)
        self.settings = settings
        self.given = given
        """The settings as they were given."""

        self.listed = [*listed]
        """What the user lists to be put back, with a state of its own."""

        self.sizing: Sizing | None = None
        """What the settings ask of a probe; None before training."""

        self.sizes: Sizes | None = None
        """The largest batch on a device, what bounds it, and the batch to begin with; None before training."""

        self.schedule: StepPlan | None = None
        """Batch size and steps of each epoch; None before training."""

        self.waited = 0.0
        """Seconds that this run has spent on the probe."""

        self.begins = False
        """True from the call of ``train`` until its loader is there."""

        self.called_model: Any = None
        """The model that parts call, without DDP; not among those of the trainer, which a stored probe depends on."""

        self.data: TrainingData | None = None
        self.step: StepInParts | None = None
        self.evaluation = EvaluationInParts(trainer)
        self.ranks = Ranks(trainer.args.device)
        self._trainer = trainer
        self._increase = resolve(settings.batch_increase_function) if settings.batch_increase_function else ("", None)
        self._asked = AskedOnce()
        self._known = Known()
        self._follower: tuple[LambdaLR, list[Any]] | None = None  # the schedule that trains, and what it follows

    @property
    def probe(self) -> ProbeResult | None:
        """The largest forward, with every measurement; None if none was looked for, or before training."""
        stored = self._known.stored
        return None if self.schedule is None or stored is None else stored.result

    @property
    def longest(self) -> int | None:
        """Tokens of the longest sample; None if they are unknown, or nothing was probed."""
        return None if self._known.stored is None or not self.is_text else self._known.stored.tokens

    @property
    def is_text(self) -> bool:
        """True if the tokens of samples are known, which those of images are not."""
        return self.data is not None and self.data.length is not None

    @property
    def num_recoveries(self) -> int:
        """Number of times that samples of a step have had to run again."""
        return 0 if self.step is None else self.step.limit.num_recoveries

    @property
    def max_tokens(self) -> int | None:
        """Padded tokens that a forward holds at most with ``micro_batch_size="auto"``."""
        stored, sizing = self._known.stored, self.sizing
        if stored is None or sizing is None or not sizing.bounds_forwards:
            return None
        return stored.samples * stored.tokens

    @property
    def batch_size(self) -> int:
        """Samples of a batch on a device, or of a forward with ``keep_global_batch``."""
        return self._in_forward or int(self._trainer._train_batch_size)

    @property
    def global_batch_size(self) -> int:
        """Samples of an optimizer step on all devices."""
        args = self._trainer.args
        return int(self._trainer._train_batch_size * args.gradient_accumulation_steps * args.world_size)

    def planned(self, rate: Callable[[int], float] | None = None, after: int = 0) -> list[PlannedEpoch]:
        """Return what is left of each epoch after ``after`` steps of the run; see ``StepPlan.planned``."""
        assert self.schedule is not None and self.data is not None
        epochs = self.schedule.planned(self.data.num_samples, self.ranks.size, rate, after)
        for epoch in epochs:
            epoch.batch_sizes = [self._in_forward or size for size in epoch.batch_sizes]
        return epochs

    def __str__(self) -> str:
        given = ", ".join(f"{name}={value}" for name, value in self.given.items())
        if self.schedule is None:
            return f"{given}; sizes and plan are determined when training begins"
        assert self.sizes is not None
        lines = [("maximum batch size", f"{self.sizes.maximum} ({self.sizes.reason})")]
        if self.probe is not None:
            lines = lines_of_probe(self.probe, self.longest or 1, self.probed)
        epochs = self.planned()
        plan = [f"  {line}" for line in table_of_plan(epochs)]
        return "\n".join([given, *named(lines), f"the plan: {sum(each.steps for each in epochs)} steps", *plan])

    @property
    def probed(self) -> str:
        """The size that a probe looks for, in words."""
        assert self.sizing is not None
        return "maximum batch size" if self.sizing.bounds_batch else "largest forward pass"

    @property
    def _in_forward(self) -> int | None:
        """Samples of a forward, where the batch stays as it is and its forwards do not."""
        size = None if self.sizes is None else self.sizes.micro_batch_size
        return size.samples if isinstance(size, Fixed) and size != self.settings.micro_batch_size else None

    def resume_from(self, checkpoint: Path) -> None:
        """Take what the run that is resumed has found, rather than to look for it again."""
        path = checkpoint / FILE

        def read() -> tuple[Known, list[int]]:
            values = json.loads(path.read_text())
            known = Known(
                None if values["found"] is None else StoredProbe.from_dict(values["found"]),
                is_resumed=True, checkpoint=str(checkpoint), devices=int(values["devices"]),
                global_batch_size=values.get("global_batch_size"),
                longest_pair=_tuple_of(values.get("longest_pair"), 2), cut_short=_tuple_of(values.get("cut_short"), 3),
            )  # fmt: skip
            return known, values.get("sizes", [])

        unread = Known(is_resumed=True, checkpoint=str(checkpoint))
        read_back = self.ranks.on_first(lambda: read_stored(read, f"what is stored in {path}"))
        self._known, sizes = read_back or (unread, [])
        self._asked.note(sizes)

    def place_of(self, step: int, epoch: float) -> tuple[int, int]:
        """Return how many epochs are over after ``step`` steps of the run that is resumed, and steps of the next.

        Raises:
            ConfigError: Unless ``epoch`` epochs are over then in this run, too.
        """
        assert self.schedule is not None and self.data is not None
        known = self._known
        if not self.data.has_length:
            if not self._trainer.args.ignore_data_skip:
                self._check_samples_of_step()
            return (0, step) if known.cut_short is None else known.cut_short[:2]
        if known.cut_short is not None and known.cut_short[2] == [*self.schedule.steps]:
            return known.cut_short[:2]
        self._check_place(step, epoch)
        return self.schedule.place_of(step)

    def _check_samples_of_step(self) -> None:
        """Raise ConfigError unless a step of the run that is resumed had as many samples, by which a stream skips."""
        before, now = self._known.global_batch_size, self.global_batch_size
        if before is not None and before != now:
            raise ConfigError(
                f"resume_from_checkpoint={self._known.checkpoint!r} is of a run with {before} samples in a step, and "
                f"this has {now}, so that its steps are not those that are to be skipped; resume with the devices, "
                "per_device_train_batch_size, gradient_accumulation_steps and settings that it began with, or set "
                "ignore_data_skip=True"
            )

    def _check_place(self, step: int, epoch: float) -> None:
        assert self.schedule is not None
        epochs, devices = self.schedule.epochs_after(step), self._trainer.args.world_size
        resumed = f"resume_from_checkpoint={self._known.checkpoint!r}"
        if not step or abs(epoch - epochs) <= 1e-6:
            return
        before = self._known.devices or devices
        if before != devices:
            accumulated = self._trainer.args.gradient_accumulation_steps * before / devices
            instead = f", or set gradient_accumulation_steps={accumulated:.0f}" if accumulated.is_integer() else ""
            raise ConfigError(
                f"{resumed} is of a run on {before} devices, and on {devices} a step "
                f"would have other samples; resume on {before}{instead}"
            )
        raise ConfigError(
            f"{resumed}: {epoch:.3f} epochs were over after step {step}, and would be "
            f"{epochs:.3f} with the batch sizes of this run; resume with the data, the devices, "
            f"per_device_train_batch_size and settings that it began with"
        )

    @property
    def output_dir(self) -> Path:
        """Where checkpoints are: in a search for hyperparameters, the folder of a trial."""
        return Path(self._trainer._get_output_dir(trial=getattr(self._trainer, "_trial", None)))

    def save(self, checkpoint: Path, epochs: int, steps: int) -> None:
        """Store what a resumed run goes on with, after so many epochs, and steps of the next."""
        assert self.schedule is not None
        stored = None if self._known.stored is None else self._known.stored.to_dict()
        planned = self.schedule.place_of(self._trainer.state.global_step)
        epochs, steps = (epochs, steps) if epochs >= 0 else planned  # before the first epoch has begun
        begun = self.schedule.decisions[: epochs + (steps > 0)]
        values = {
            "devices": self._trainer.args.world_size,
            "global_batch_size": self.global_batch_size,
            "found": stored,
            "sizes": [each.previous for each in begun[:1]] + [each.batch_size for each in begun],
            "longest_pair": None,
        }
        if self.data is not None and isinstance(self.data.length, PairLength):
            values["longest_pair"] = self.data.longest_pair
        if (epochs, steps) != planned:  # a callback has ended an epoch early
            values["cut_short"] = epochs, steps, [*self.schedule.steps]
        (checkpoint / FILE).write_text(json.dumps(values))

    def prepare(self, loader: Any) -> None:
        """Find what there is to find before training on the batches of ``loader``, and set the size of the first.

        Random state stays as it is, that of the collate function included, and what Accelerate has been told of.

        Raises:
            ConfigError: If the loader, the data or the model cannot be trained this way.
            DoesNotFitError: If not even a short sample fits.
        """
        trainer, state = self._trainer, state_of(self._trainer)
        if self.step is not None:  # of an earlier run
            state.reported = self.step.state.reported
        of_accelerate = trainer.accelerator._dataloaders
        draws = unchanged_random_state(trainer.args.device), draws_put_back(trainer.data_collator)
        with draws[0], draws[1], reporting(state):
            try:
                self._prepare(loader, state)
            finally:
                trainer.accelerator._dataloaders = of_accelerate  # a probe has made it forget them

    def _prepare(self, loader: Any, state: State) -> None:
        trainer, settings, args, self.waited = self._trainer, self.settings, self._trainer.args, 0.0
        self._check_that_ranks_have_the_same_settings()
        kind: Any = TrainingData
        if isinstance(getattr(loader, "dataset", None), IterableDataset):
            kind = functools.partial(StreamedData, ranks=self.ranks, grows=settings.grows)
        data: TrainingData = kind(
            trainer, loader, resizes=settings.resizes, before=self.data, longest_pair=self._known.longest_pair
        )
        self.data = data
        self._known = dataclasses.replace(self._known, longest_pair=None)  # other data may come
        if settings.resizes and not settings.keep_global_batch and trainer.lr_scheduler is not None:
            self._is_of_steps(trainer.lr_scheduler)  # of the user's own: an error need not wait for a probe
        configured, accumulated = int(args.per_device_train_batch_size), int(args.gradient_accumulation_steps)
        is_bound = data.has_length or not settings.use_maximum_batch_size  # by the samples of a run of max_steps
        samples = -(-data.num_samples // args.world_size) if is_bound else _ENDLESS
        self.sizing = sizing = size_up(
            settings, batch_size=configured, accumulation=accumulated, samples=samples,
            keeps_rest=True, plans_first=True, keeps_batches=True,
        )  # fmt: skip
        self.step = step = self._make_step(data, state, splits=sizing.splits)

        sizes = sizing.unprobed
        if sizing.probes and sizing.bounds_batch:
            result = self._find(sizing.request, data, step).result
            sizes = sizing.sizes_from_probe(result.batch_size, result.bound)
        if isinstance(sizes.micro_batch_size, Whole) and sizes.batch_size > sizes.maximum:
            log.warning(
                "per_device_train_batch_size=%d is above the maximum of %d, bound by %s; starting there",
                sizes.batch_size, sizes.maximum, sizes.reason,
            )  # fmt: skip
            sizes = dataclasses.replace(sizes, batch_size=sizes.maximum)
        self.sizes = sizes

        (name, increase), asked = self._increase, self._asked
        increase = increase and asked.function(increase)
        self._asked = AskedOnce()  # answers last for one run
        decide = growing(sizes.batch_size, sizes.maximum, name, increase, samples, self.ranks.on_first)
        length = Length(args.num_train_epochs if data.has_length else 1, args.max_steps)
        data.set_batch_size(sizes.batch_size)  # of which max_steps makes the samples of a stream
        self.schedule = plan_steps(decide, data.num_batches, accumulated, length, min(configured, samples))
        if sizing.probes and not sizing.bounds_batch:  # the step stays as it is: how it is split is left
            forwards = sizing.of_forwards(max(self.schedule.sizes) * accumulated)
            self._find(forwards.request, data, step)
            step.limit.bound = self.max_tokens
        if self.probe is not None:
            step.limit.note(self.probe.batch_size * (self.longest or 1))
        if self._in_forward is not None:
            step.size = Fixed(self._in_forward)
            step.check_that_parts_add_up()
        self.start_epoch(0)

    def _check_that_ranks_have_the_same_settings(self) -> None:
        """Raise ConfigError if a rank has others, as it would wait for what the rest does not do."""
        of_ranks = self.ranks.gather(dict(self.given))
        for rank, given in enumerate(of_ranks):
            for name in sorted(given.keys() | of_ranks[0].keys()):
                first, here = of_ranks[0].get(name), given.get(name)
                if first != here:
                    raise ConfigError(
                        f"adaptive has {name}={first!r} on rank 0 and {here!r} on rank {rank} (None: not set); give "
                        "all processes the same settings"
                    )

    def _make_step(self, data: TrainingData, state: State, *, splits: bool) -> StepInParts:
        """Find out what the loss is, and return the step that is right for it."""
        trainer, settings, size = self._trainer, self.settings, self.settings.micro_batch_size
        assert not isinstance(size, Explore)  # is refused
        try:
            if trainer.is_fsdp_enabled:
                shard(trainer)
            with without_gathering(trainer):
                check_batch_samples(trainer, [collated([sample], trainer.data_collator) for sample in data.some[:2]])
            kind, module, samples = self._find_loss_kind(data, splits=splits)
            trainer.loss_is_scaled_for_ga = kind.takes_number
            if (joins := samples is data.some) and (of_batch := self._not_to_join(data, kind)):
                samples, joins = of_batch, False
            step = StepInParts(
                trainer, kind, size, data.length, self.ranks, state=state, padding=settings.padding,
                balances_ranks=settings.balance_ranks and joins, joins_batches=joins, dependent_module=module,
                recovers=settings.recover_from_oom is not False, audit_every=settings.audit_every,
            )  # fmt: skip
            if step.sharing is None and rebalances(trainer.args):
                raise ConfigError(
                    "train_sampling_strategy='batch_rebalance' needs the lengths of samples, which are unknown for "
                    "images, and does not go with neftune_noise_alpha; set it to 'random'"
                )
            get_ready(step, samples)
            if splits:
                step.check_that_parts_add_up()
            return step
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise DoesNotFitError.even_of_few("gradient_checkpointing=True, bf16=True, LoRA") from error

    def _find_loss_kind(self, data: TrainingData, *, splits: bool) -> tuple[LossKind, str | None, list[Any]]:
        """Return what the loss is, what module computes over the batch if one does, and the samples that showed it.

        They are from all of the data. If their losses do not add up and batches are by somebody's own sampler, they are
        those of a batch: samples that no batch holds together need not add up.
        """
        trainer, ranks = self._trainer, self.ranks
        try:
            return *find_loss_kind(trainer, data.some, ranks, splits=splits), data.some
        except Exception as error:
            if is_out_of_memory(error) or not data.has_own_sampler:
                raise
            batches = [batch for batch in data.some_batches(ranks, _LOOKED_AT) if len(batch) > 1]
            try:
                found = [find_loss_kind(trainer, batch, ranks, splits=splits) for batch in batches]
            except Exception:
                raise error from None
            if not found or any(each != found[0] for each in found):
                raise
            return *found[0], batches[0]

    def _not_to_join(self, data: TrainingData, kind: LossKind) -> list[Any]:
        """Return samples of a batch if those of several batches of a step may not run together; else none."""
        trainer, ranks = self._trainer, self.ranks
        if data.draws_from_all or (trainer.args.gradient_accumulation_steps == 1 and ranks.size == 1):
            return []
        batches = data.some_batches(ranks, _TOGETHER)
        of_all_ranks = [batch[0] for batch in batches[:: ranks.size]]
        if add_up_together(trainer, kind, of_all_ranks[:_TOGETHER], ranks):
            return []
        log.info("each batch runs by itself: samples of different batches do not add up in one forward pass")
        return batches[0]

    def start_epoch(self, epoch: int) -> None:
        assert self.schedule is not None and self.data is not None
        self.data.set_batch_size(self.schedule.sizes[min(epoch, len(self.schedule.sizes) - 1)])

    def _is_of_steps(self, scheduler: Any) -> bool:
        """Return True if a learning rate is a function of the step, and False if it is one of metrics that stays so.

        Raises:
            ConfigError: If it can follow batches of other sizes in neither way.
        """
        if isinstance(scheduler, LambdaLR):
            return True
        if "metrics" in inspect.signature(scheduler.step).parameters and self.settings.lr_scaling == "none":
            return False
        raise ConfigError(
            f"{type(scheduler).__name__} is no function of the step, so that it cannot follow batches of other sizes; "
            "take a schedule of transformers, such as lr_scheduler_type='linear', and lr_scaling='none'"
        )

    def follow(self, scheduler: Any) -> Any:
        """Return the schedule as it is to be for batches of other sizes than configured: one of samples."""
        schedule, rule = self.schedule, self.settings.lr_scaling
        lambdas = getattr(scheduler, "lr_lambdas", [])
        if self._follower is not None and scheduler is self._follower[0]:  # of an earlier call of train()
            lambdas = self._follower[1]
        if schedule is None or schedule.is_as_configured or not self._is_of_steps(scheduler):
            return scheduler
        optimizer = scheduler.optimizer
        unwrapped = getattr(optimizer, "optimizer", optimizer)

        def rate_at(step: int, rate: Callable[[Any], float]) -> float:
            growth = schedule.size_at(step) / schedule.reference_size
            scale = learning_rate_scale(rule, unwrapped, growth, self.settings.max_lr_scale)
            return rate(schedule.scheduled(step)) * scale

        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"]
        of_samples: list[Any] = [functools.partial(rate_at, rate=rate) for rate in lambdas]
        follower = LambdaLR(optimizer, of_samples, last_epoch=scheduler.last_epoch - 1)
        self._follower = follower, lambdas
        return follower

    def _find(self, request: ProbeRequest, data: TrainingData, step: StepInParts) -> StoredProbe:
        """Return the largest forward that fits: what was found before, where it still holds, or else of a probe."""
        trainer, settings, ranks, known = self._trainer, self.settings, self.ranks, self._known
        meter = memory_meter(trainer.args.device)
        # To go on, all lengths are not read again: with other data, check_place refuses.
        of_checkpoint = known.stored if known.is_resumed else None
        tokens = of_checkpoint.tokens if of_checkpoint else data.extremes.tokens
        known_samples = data.num_samples if data.has_length else None  # max_steps may be another when the run goes on
        facts: dict[str, Any] = {"samples": known_samples, "longest": tokens, "include": request.include}
        facts |= {"rows": "end to end"} if step.in_rows else {}
        now = conditions_of(trainer, settings, request, facts, meter, ranks.size)
        available = int(ranks.smallest(memory_budget(settings, meter)))
        source = f"the probe of {known.checkpoint}" if of_checkpoint else "this trainer's probe"
        stored = ranks.on_first(
            lambda: taken_again(known.stored, now, request.upper, available, stays=known.is_resumed, source=source)
        )
        if stored is None:
            start = time.perf_counter()
            tokens, mean, *extremes = data.extremes
            if request.may_stop_early:
                step.times.samples_left = sum(each.samples for each in self.planned()) / ranks.size * mean / tokens
            if step.in_rows:
                request = dataclasses.replace(request, suffices=-(-first_row(trainer.args.device.type) // tokens))
            folder = Path(trainer.args.output_dir)
            result = probe(trainer, step, extremes, settings, request, ranks=ranks, scratch=folder)
            self.waited = time.perf_counter() - start
            now = dataclasses.replace(now, run={**now.run, "longest": tokens})
            stored = StoredProbe(result, now, request.upper, tokens)
        self._known = dataclasses.replace(known, stored=stored, is_resumed=False)
        return stored


def _tuple_of(values: Any, length: int) -> Any:
    """Return a list that was read as a tuple, None as None; a ValueError if it has another length."""
    if values is not None and len(values) != length:
        raise ValueError(f"{values} has {len(values)} entries instead of {length}")
    return None if values is None else tuple(values)


class FollowingCallback(TrainerCallback):
    """Gives each epoch its batch size, and tells how much of it is over."""

    def __init__(self, run: AdaptiveRun) -> None:
        self._run = run
        self.epoch = self._steps = 0
        self._is_over = False  # the epoch

    def start_at(self, epoch: int, steps: int) -> None:
        self.epoch, self._steps = epoch - 1, steps

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.epoch += 1
        self._is_over = False
        if hasattr(shown := kwargs["train_dataloader"], "set_epoch"):
            shown.set_epoch(self.epoch)  # as Trainer does with the loader that it runs
        self._run.start_epoch(self.epoch)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Trainer takes all epochs to have as many steps.
        self._steps += 1
        assert self._run.schedule is not None
        state.epoch = self.epoch + self._run.schedule.part_of(self.epoch, self._steps)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # What ends training within an epoch leaves it to a run that goes on.
        if not control.should_training_stop or self._ends_epoch(control):
            self._steps, self._is_over = 0, True

    def _ends_epoch(self, control: Any) -> bool:
        """Return True if an epoch has all of its steps, or a callback has ended it."""
        assert self._run.schedule is not None
        steps = self._run.schedule.steps
        return control.should_epoch_stop or self._steps >= steps[min(self.epoch, len(steps) - 1)]

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        checkpoint = self._run.output_dir / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and checkpoint.is_dir():
            is_over = self._is_over or self._ends_epoch(control)
            self._run.save(checkpoint, self.epoch + is_over, 0 if is_over else self._steps)

    on_push_begin = on_save  # an upload of the checkpoint begins before it is told that one was saved
