"""``Trainer``, or a subclass of it, with our behaviour."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from adaptive_batching._transformers import one_loop
from adaptive_batching._transformers.adaptive_run import AdaptiveRun, FollowingCallback
from adaptive_batching._transformers.arguments import AdaptiveArguments, fields_set, in_trainers_words
from adaptive_batching._transformers.distilled import DistilledRun, distils
from adaptive_batching._transformers.generated import (
    AdaptiveGeneration,
    AdaptiveScoring,
    GeneratedRun,
    scores_completions,
)
from adaptive_batching._transformers.generated_recording import GeneratedRecording
from adaptive_batching._transformers.handed_out import (
    Samples,
    StepInputs,
    handing_out_samples,
    has_decoder,
    length_function,
    replaced,
)
from adaptive_batching._transformers.loss_kind import find_loss_kind
from adaptive_batching._transformers.recording import Recording
from adaptive_batching._transformers.refusals import check_class, rebalances
from adaptive_batching._transformers.sharded import prepared_already
from adaptive_batching._transformers.trainer_probe import without_ddp
from adaptive_batching._values import AdaptiveBatchingError, ConfigError, first_line

log = logging.getLogger(__name__)

_MADE: dict[type[Trainer], type[Trainer]] = {}


_OfTrainer = TypeVar("_OfTrainer", bound=Trainer)


def adaptive(trainer_class: type[_OfTrainer]) -> type[_OfTrainer]:
    """Return a subclass of ``trainer_class`` with our behaviour, which takes ``adaptive=AdaptiveArguments(...)``.

    ``"auto"``, or a mapping of settings, will do as well. Without it, or with none of its fields set, training is that
    of ``trainer_class``, bit for bit. Otherwise the optimizer sees ``per_device_train_batch_size`` times
    ``gradient_accumulation_steps`` samples, as before, and more if the batch is to grow or to be the largest that fits;
    how many forward passes they take changes no gradient.

    Args:
        trainer_class: ``Trainer``, or a class that inherits from it, such as ``SFTTrainer``.

    Raises:
        TypeError: If it is no such class.
    """
    if not (isinstance(trainer_class, type) and issubclass(trainer_class, Trainer)):
        raise TypeError(f"adaptive takes a class that inherits from transformers.Trainer, and got {trainer_class!r}")
    if issubclass(trainer_class, TakesSettings):
        return trainer_class
    if trainer_class not in _MADE:
        _MADE[trainer_class] = _make(trainer_class)
    return cast("type[_OfTrainer]", _MADE[trainer_class])


def _make(trainer_class: type[Trainer]) -> type[Trainer]:
    # It has the name of what it is to its user, in our messages and in those of others.
    members = {name: getattr(trainer_class, name) for name in ("__module__", "__qualname__", "__doc__")}
    ours: tuple[type, ...] = (AdaptiveTraining,)
    if (kind := _generating(trainer_class)) is not None:
        ours = (TakesSettings, kind[0])
    elif one_loop.IS_IN_USE:
        ours = (one_loop.InOneLoop, AdaptiveTraining)
    return cast("type[Trainer]", type(trainer_class.__name__, (*ours, trainer_class), members))


def adopt(
    trainer: _OfTrainer,
    settings: AdaptiveArguments | Mapping[str, Any] | str = "auto",
    *,
    only_if_possible: bool = False,
    state: Sequence[Any] = (),
) -> _OfTrainer:
    """Make a trainer adaptive that is there already, and return it.

    It then trains as one of ``adaptive(type(trainer))`` would, and ``trainer.adaptive`` is what it has found. Its class
    becomes a subclass of its own; nothing else about it changes. Without settings of size or growth it stays as it is.

    Args:
        trainer: Before it trains.
        settings: ``"auto"``, a mapping of settings, or ``AdaptiveArguments``.
        only_if_possible: True to have a trainer that cannot train this way train as it would without, with one line in
            the log that says why. What shows in a step, rather than before, still ends training.
        state: Whatever else the loss changes that has to be as before where samples run again, and after checks and the
            probe: objects with ``state_dict`` and ``load_state_dict``. Weights, buffers, gradients, random numbers,
            metrics of TRL, and attributes of the trainer that are numbers or tensors of up to 1 MiB are, in any case.

    Raises:
        TypeError: If it is no ``Trainer``.
        ConfigError: On wrong settings, a ``state`` without these methods, a trainer that is adaptive already, and,
            unless ``only_if_possible``, one that cannot be trained this way.
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(f"adopt takes a transformers.Trainer, and got {trainer!r}")
    if getattr(trainer, "adaptive", None) is not None:
        raise ConfigError(f"this {type(trainer).__name__} is adaptive already; give it settings once")
    if trainer.is_in_train:
        raise ConfigError("adopt changes how training begins; call it before trainer.train()")
    arguments = AdaptiveArguments.of(settings)
    of_run = arguments.settings(trainer.args.per_device_train_batch_size)
    if not of_run.enabled:
        return trainer
    try:
        with in_trainers_words():
            if (kind := _generating(type(trainer))) is not None:
                given = fields_set(arguments)
                generated = kind[1](trainer, of_run, given, only_if_possible=only_if_possible)
                return _adopt_generating(trainer, generated, state)
            run = AdaptiveRun(trainer, of_run, fields_set(arguments), state)
    except AdaptiveBatchingError as error:
        if not only_if_possible:
            raise
        log.warning("%s trains without adaptive batching: %s", type(trainer).__name__, first_line(error))
        return trainer
    if "train" in vars(trainer):
        trainer._own_train = vars(trainer).pop("train")
    trainer.__class__ = adaptive(type(trainer))
    trainer.adaptive = run
    if only_if_possible:
        trainer._only_if_possible = True
    trainer._following, trainer._recording = FollowingCallback(run), Recording(run, trainer)
    # Ours comes first, so that others find the right epoch. A new list: a callback that adopts is called from the old.
    handler = trainer.callback_handler
    handler.callbacks = [trainer._following, *handler.callbacks, trainer._recording]
    return trainer


def _generating(trainer_class: type) -> tuple[type, type[GeneratedRun]] | None:
    """Return what is mixed into a class of trainers that generate, and the class of their runs; None for others."""
    if scores_completions(trainer_class):
        return AdaptiveScoring, GeneratedRun
    return (AdaptiveGeneration, DistilledRun) if distils(trainer_class) else None


def _adopt_generating(trainer: _OfTrainer, run: GeneratedRun, state: Sequence[Any]) -> _OfTrainer:
    if state:
        raise ConfigError(f"{type(trainer).__name__} runs no code of yours again, as reward functions; leave out state")
    trainer.__class__ = adaptive(type(trainer))
    trainer.adaptive = run
    trainer._recording = GeneratedRecording(run, trainer)
    handler = trainer.callback_handler
    handler.callbacks = [*handler.callbacks, trainer._recording]  # a new list: a callback may be adopting
    return trainer


def _release(trainer: Any) -> None:
    """Have a trainer train as it did before it was adopted."""
    for callback in (trainer._following, trainer._recording):
        trainer.remove_callback(callback)
    trainer._recording.drop()
    trainer.__dict__.pop("loss_is_scaled_for_ga", None)
    if trainer._own_train is not None:
        trainer.train = trainer._own_train
    trainer.adaptive = None


class TakesSettings:
    """Mixed into a trainer class, before it: takes ``adaptive`` besides the arguments of the class."""

    adaptive: Any = None

    def __init__(
        self, *args: Any, adaptive: AdaptiveArguments | Mapping[str, Any] | str | None = None, **kwargs: Any
    ) -> None:
        arguments = None if adaptive is None else AdaptiveArguments.of(adaptive)
        trainer_class = cast("type[Trainer]", type(self))
        if arguments is not None and arguments.settings(batch_size=1).enabled and _generating(trainer_class) is None:
            given = (each for each in (*args, *kwargs.values()) if isinstance(each, TrainingArguments))
            check_class(trainer_class, next(given, None))
        super().__init__(*args, **kwargs)
        if arguments is not None and self.adaptive is None:  # a callback may have adopted it by now
            adopt(cast("Trainer", self), arguments)


class AdaptiveTraining(TakesSettings):
    """Mixed into a trainer class, before it."""

    adaptive: AdaptiveRun | None = None
    """Findings and plan of the adaptive run; None if training is ``Trainer``'s own."""

    _own_train: Callable[..., Any] | None = None
    """A ``train`` that the trainer itself had when it was adopted, around that of its class, as unsloth gives it."""

    _following: FollowingCallback
    _recording: Recording
    _only_if_possible = False  # True to train as stock where an error would be raised before the first step

    # Set by Trainer
    args: Any
    callback_handler: Any
    data_collator: Any
    is_fsdp_enabled: bool
    lr_scheduler: Any
    model: Any
    state: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for method in ("training_step", "prediction_step"):
            if getattr(cls, method) is not getattr(AdaptiveTraining, method):
                base = next(each.__name__ for each in cls.__mro__[1:] if issubclass(each, Trainer))
                raise ConfigError(
                    f"{method} of {cls.__name__} would get samples that are not collated yet, because {cls.__name__} "
                    f"inherits from adaptive({base}); write class {cls.__name__}({base}), and adaptive({cls.__name__})"
                )

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        stock = self._own_train or super().train  # type: ignore[misc]
        if self.adaptive is None:
            return stock(resume_from_checkpoint, *args, **kwargs)
        if self.args.max_steps <= 0 and self.args.num_train_epochs <= 0:  # there is nothing to train, and to find
            self.adaptive.schedule = None
            return stock(resume_from_checkpoint, *args, **kwargs)
        self.adaptive.begins = True
        last = get_last_checkpoint(self.args.output_dir) if resume_from_checkpoint is True else resume_from_checkpoint
        if last:
            self.adaptive.resume_from(Path(last))
        with self._recording.of_training(resumed=bool(last)), in_trainers_words():
            return stock(resume_from_checkpoint, *args, **kwargs)

    def set_initial_training_values(self, args: Any, dataloader: Any, *more: Any) -> Any:
        """Find what there is to find before training, and lay out the run for the sizes of its epochs.

        They have different numbers of steps. ``Trainer`` takes all to be as long as the longest: in a shorter one it
        asks for more batches and gets none.
        """
        if self.adaptive is not None and self.adaptive.begins:
            self.adaptive.begins = False
            try:
                with in_trainers_words():
                    self.adaptive.prepare(dataloader)
            except AdaptiveBatchingError as error:
                if not self._only_if_possible or self.is_fsdp_enabled:  # which has left the model sharded
                    raise
                log.warning("%s trains without adaptive batching: %s", type(self).__name__, first_line(error))
                _release(self)
        values = super().set_initial_training_values(args, dataloader, *more)  # type: ignore[misc]
        if self.adaptive is None or (schedule := self.adaptive.schedule) is None:
            return values
        assert self.adaptive.data is not None
        if not self.adaptive.data.has_length:  # of a stream, Trainer makes pass after pass until it has taken max_steps
            return values
        epochs, updates = len(schedule.steps), max(schedule.steps)
        return (epochs, updates, *values[2:5], updates * args.gradient_accumulation_steps, schedule.max_steps)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Return the epoch to go on in, and its batches that are over; ``Trainer`` takes epochs to be equally long."""
        epochs_and_steps = super()._init_training_state(*args, **kwargs)  # type: ignore[misc]
        if self.adaptive is None or self.adaptive.schedule is None:
            return cast("tuple[int, int]", epochs_and_steps)
        epoch, steps = self.adaptive.place_of(self.state.global_step, self.state.epoch)
        if self.args.ignore_data_skip:  # the epoch is run from its start
            steps = 0
        self._following.start_at(epoch, steps)
        return epoch, steps * self.args.gradient_accumulation_steps

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        """Give callbacks the loader of batches, and the loop of ``Trainer`` one of samples."""
        stock = super()._prepare_for_training  # type: ignore[misc]
        if self.adaptive is None:
            return stock(*args, **kwargs)
        with prepared_already(self) if self.is_fsdp_enabled else contextlib.nullcontext():
            model, loader = stock(*args, **kwargs)
        self.adaptive.called_model = without_ddp(self, model)
        of_samples = handing_out_samples(loader, self.data_collator)
        assert of_samples is not None  # as was checked
        if self.adaptive.data is not None:  # else there is nothing to train
            self.adaptive.data.loaders.append(of_samples)
        return model, of_samples

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        """Return the sampler of ``Trainer``; where it would balance ranks, which share out steps, one that draws."""
        replaces = self.adaptive is not None and rebalances(self.args)
        with replaced(self.args, train_sampling_strategy="random") if replaces else contextlib.nullcontext():
            return super()._get_train_sampler(*args, **kwargs)  # type: ignore[misc]

    def create_scheduler(self, num_training_steps: int, *args: Any, **kwargs: Any) -> Any:
        stock = super().create_scheduler  # type: ignore[misc]
        if self.adaptive is None or self.adaptive.schedule is None:
            return stock(num_training_steps, *args, **kwargs)
        stock(self.adaptive.schedule.scheduled_steps, *args, **kwargs)
        self.lr_scheduler = self.adaptive.follow(self.lr_scheduler)
        return self.lr_scheduler

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Return the batches of an optimizer step, all in the last of as many as ``Trainer`` accumulates."""
        if self.adaptive is None:
            return cast("tuple[list[Any], Any]", super().get_batch_samples(epoch_iterator, num_batches, device))  # type: ignore[misc]
        wanted = self.args.gradient_accumulation_steps
        batches = [batch.features for _, batch in zip(range(wanted), epoch_iterator, strict=False)]
        if not batches:
            return [], None
        steps = [*(StepInputs() for _ in range(wanted - 1)), StepInputs(batches)]
        for inputs in steps:
            inputs.note(self._main_input, 0, 0)
        return steps, None

    @property
    def _main_input(self) -> str:
        return getattr(self.model, "main_input_name", "input_ids")

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        if not isinstance(inputs, StepInputs):
            return cast("torch.Tensor", super().training_step(model, inputs, num_items_in_batch))  # type: ignore[misc]
        if not inputs.batches:
            return torch.zeros((), device=self.args.device)
        assert self.adaptive is not None and self.adaptive.step is not None
        loss = self.adaptive.step(inputs, partial(self.forward_backward, self.adaptive.called_model))
        self._recording.ran(inputs, loss)
        return loss

    def forward_backward(self, model: Any, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
        """Run forward and backward of a part, as the trainer class does with a batch."""
        return cast("torch.Tensor", super().training_step(model, inputs, num_items_in_batch))  # type: ignore[misc]

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the loop on samples where it can run in parts; callbacks get the loader of batches."""
        run, loop = self.adaptive, super().evaluation_loop  # type: ignore[misc]
        of_samples = self._of_samples_to_evaluate(dataloader, loop)
        if run is None or of_samples is None:
            return loop(dataloader, *args, **kwargs)
        before, run.evaluation.loader = run.evaluation.loader, dataloader
        try:
            return loop(of_samples, *args, **kwargs)
        finally:
            run.evaluation.loader, self.callback_handler.eval_dataloader = before, dataloader

    def _of_samples_to_evaluate(self, dataloader: Any, loop: Any) -> Any:
        """Return the loader that hands out the samples of another, or None if they are not evaluated in parts."""
        run = self.adaptive
        if run is None or run.settings.recover_from_oom is False:
            return None
        # A loop of the user's own may look into batches, as Accelerate does into those of a stream, and Trainer into
        # those whose inputs are asked for.
        is_known = loop.__module__.partition(".")[0] in ("transformers", "trl")
        dataset = dataloader.dataset if isinstance(dataloader, DataLoader) else None
        has_items = hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset)
        in_parts = is_known and has_items and "inputs" not in self.args.include_for_metrics
        if self.args.world_size > 1:  # a rank would be waited for in what TRL gathers in a forward, and FSDP in a layer
            steps = super().prediction_step.__func__, type(self).compute_loss  # type: ignore[misc, attr-defined]
            in_parts = in_parts and not self.is_fsdp_enabled
            in_parts = in_parts and steps == (Trainer.prediction_step, Trainer.compute_loss)
        if in_parts and dataloader not in run.evaluation.loaders:
            run.evaluation.loaders[dataloader] = handing_out_samples(dataloader, self.data_collator)
        return run.evaluation.loaders[dataloader] if in_parts else None

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        stock = super().prediction_step  # type: ignore[misc]
        if not isinstance(inputs, Samples):
            return stock(model, inputs, prediction_loss_only, ignore_keys)
        assert self.adaptive is not None
        self.callback_handler.eval_dataloader = self.adaptive.evaluation.loader
        samples = inputs.features
        length = length_function(samples[0], targets=has_decoder(self.model))
        return self.adaptive.evaluation(
            samples, length, lambda: find_loss_kind(self, samples)[0],
            lambda batch: stock(model, batch, prediction_loss_only, ignore_keys),
        )  # fmt: skip

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if self.adaptive is not None and "loss" in logs:
            logs |= self._recording.metrics()
            self._recording.flush(waits=True)  # Trainer has just waited for the device, for the mean loss
        super().log(logs, *args, **kwargs)  # type: ignore[misc]
