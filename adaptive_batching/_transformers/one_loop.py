"""The training loop of transformers before 5.3, which is one method, without the hooks that later ones have.

What we do in those hooks is done here in what that method calls: the loader that it makes, the numbers that it counts
with, the first event of its callbacks. Once 5.3 is the oldest version, this file can go.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import Trainer

from adaptive_batching._transformers.handed_out import StepInputs, handing_out_samples, replaced
from adaptive_batching._transformers.trainer_probe import without_ddp

IS_IN_USE = not hasattr(Trainer, "_prepare_for_training")
CALLED = {"get_train_dataloader", "set_initial_training_values", "get_batch_samples", "training_step"}
"""Methods that the loop calls and that we replace."""


class InOneLoop:
    """Mixed into a trainer class, before ``AdaptiveTraining``."""

    adaptive: Any
    args: Any
    callback_handler: Any
    data_collator: Any
    model_wrapped: Any
    state: Any
    _following: Any

    def get_train_dataloader(self) -> Any:
        """Return a loader of samples to the loop, and one of batches to everybody else."""
        loader = super().get_train_dataloader()  # type: ignore[misc]
        if self.adaptive is None or not self.adaptive.begins:
            return loader
        of_samples = handing_out_samples(loader, self.data_collator)
        return loader if of_samples is None else _in_steps(of_samples, loader, self)  # the former raises an error later

    def set_initial_training_values(self, args: Any, dataloader: Any, *more: Any) -> Any:
        epochs, updates, *rest = super().set_initial_training_values(args, _of_batches(dataloader), *more)  # type: ignore[misc]
        if self.adaptive is not None and self.adaptive.schedule is not None:
            self._following.start_at(0, 0)
            updates = _StepsOfEpoch(updates)
            updates.trainer = self
        return (epochs, updates, *rest)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        handler = self.callback_handler

        def on_train_begin(*given: Any) -> Any:
            """Give callbacks the loader of batches. By now, the model is wrapped, and a checkpoint is loaded."""
            handler.train_dataloader = _of_batches(handler.train_dataloader)
            if self.adaptive is not None:
                self.adaptive.called_model = without_ddp(self, self.model_wrapped)
            return type(handler).on_train_begin(handler, *given)

        with replaced(handler, on_train_begin=on_train_begin):
            return super()._inner_training_loop(*args, **kwargs)  # type: ignore[misc]

    @staticmethod
    def num_tokens(train_dl: Any, max_steps: int | None = None) -> Any:
        return Trainer.num_tokens(_of_batches(train_dl), max_steps)

    def floating_point_ops(self, inputs: Any) -> Any:
        """Count tokens, too: the loop does before a step, which does not yet know how many it takes."""
        kind = self.args.include_num_input_tokens_seen
        if isinstance(inputs, StepInputs) and inputs.batches and kind not in ("no", False):
            here = inputs.tokens if kind == "non_padding" else inputs.padded_tokens
            self.state.num_input_tokens_seen += sum(self.adaptive.ranks.gather(here))
        return super().floating_point_ops(inputs)  # type: ignore[misc]


class _StepsOfEpoch(int):
    """Steps of the longest epoch, by which the loop divides those of a run to find where to go on.

    The quotient is the number of epochs that are over, although others have fewer steps; the rest, the steps of the
    next one.
    """

    trainer: Any

    def __rfloordiv__(self, steps: int) -> int:
        place: tuple[int, int] = self.trainer.adaptive.place_of(steps, self.trainer.state.epoch)
        self.trainer._following.start_at(*place)
        return place[0]

    def __rmod__(self, steps: int) -> int:
        place: tuple[int, int] = self.trainer.adaptive.place_of(steps, self.trainer.state.epoch)
        return place[1]


def _in_steps(of_samples: Any, of_batches: Any, trainer: Any) -> Any:
    """Return a loader like ``of_samples`` whose length is that of the epoch that begins, in whole steps."""

    def length(loader: Any) -> int:
        if trainer.adaptive is None:  # it could not be
            return len(of_batches)
        steps: int = trainer.adaptive.schedule.steps[trainer._following.epoch + 1]
        return steps * int(trainer.args.gradient_accumulation_steps)

    def iterate(loader: Any) -> Iterator[Any]:
        return iter(of_batches) if trainer.adaptive is None else kind.__iter__(loader)

    kind = type(of_samples)
    made: Any = object.__new__(type(kind.__name__, (kind,), {"__len__": length, "__iter__": iterate}))
    vars(made).update(vars(of_samples), of_batches=of_batches)
    return made


def _of_batches(loader: Any) -> Any:
    return getattr(loader, "of_batches", loader)
