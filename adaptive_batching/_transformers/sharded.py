"""A model that FSDP2 has sharded: prepared once, before anything runs, with what lets its ranks recover together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from adaptive_batching._device import unchanged_random_state
from adaptive_batching._loop.samples import collated
from adaptive_batching._micro_batches.run import Outcome, run_micro_batches
from adaptive_batching._probe.trial import parameters_of
from adaptive_batching._ranks.agree import Ranks
from adaptive_batching._ranks.fsdp import MicroBatchCollectives, end_forward, is_sharded
from adaptive_batching._transformers.handed_out import Sample, alone, counters_of, put_back_counters, replaced
from adaptive_batching._transformers.loss_kind import LossKind
from adaptive_batching._values import ConfigError

T = TypeVar("T")


def shard(trainer: Any) -> None:
    """Have Accelerate shard the model of ``trainer``, with its optimizer, as ``Trainer`` does later in its run."""
    trainer.create_optimizer()
    model, trainer.optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    trainer.model = trainer.model_wrapped = model


@contextlib.contextmanager
def prepared_already(trainer: Any) -> Iterator[None]:
    """Have Accelerate give back what it is asked to prepare."""
    with replaced(trainer.accelerator, prepare=lambda *given, **options: given if len(given) > 1 else given[0]):
        yield


class Sharded:
    """Forwards and backwards of a sharded model, of which all ranks run equally many.

    What they communicate is recorded in two of them, which leave nothing behind: of the shortest of ``samples`` with
    targets, which a rank with fewer parts than others runs without weight, and of the first.

    Raises:
        ConfigError: If a forward and backward communicate in other ways than FSDP's.
    """

    def __init__(self, trainer: Any, kind: LossKind, samples: Sequence[Sample]) -> None:
        self._trainer, self._kind = trainer, kind
        others = [each for each in vars(trainer).values() if isinstance(each, nn.Module) and is_sharded(each)]
        self._models = list({id(each): each for each in (trainer.model, *others)}.values())
        self.sample = min(samples, key=self._without_targets_and_size)
        self._collectives = MicroBatchCollectives(self._models)
        self._record(samples[0])

    @property
    def can_be_traced(self) -> bool:
        """True if a trace of the model alone is one of the step: FSDP casts nothing, and there is no other model."""
        units = [module for module in self._trainer.model.modules() if is_sharded(module)]
        policies = [unit._get_fsdp_state()._mp_policy for unit in units]
        return len(self._models) == 1 and all(policy.param_dtype is None for policy in policies)

    def end_forward(self) -> None:
        """Take back what forwards without a backward have left gathered."""
        end_forward(self._models)

    def run(
        self,
        runs: Sequence[Callable[[], T]],
        ranks: Ranks,
        discard: Callable[[], None],
        count_retries: Callable[[], int],
    ) -> Outcome[T]:
        """Run forwards and backwards, equally many on every rank, up to the first that runs out of memory on one."""
        self.end_forward()  # of an evaluation
        return run_micro_batches(
            [partial(self._alike, run) for run in runs], ranks, self._collectives, discard, count_retries
        )

    def run_idle(self) -> torch.Tensor:
        """Run a sample without weight, for the collectives that other ranks wait for."""
        trainer = self._trainer
        saved, backward = counters_of(trainer), trainer.accelerator.backward
        with replaced(trainer.accelerator, backward=lambda loss, **more: backward(0 * loss.nan_to_num(), **more)):
            self._forward_backward(self.sample)
        put_back_counters(trainer, saved)
        return torch.zeros((), device=trainer.args.device)

    def _alike(self, run: Callable[[], T]) -> T:
        found = run()
        end_forward(self._models[1:])  # so that the next one gathers them again
        return found

    def _forward_backward(self, sample: Sample) -> None:
        batch = collated([sample], self._trainer.data_collator)
        number = self._kind.count(batch, 1) if self._kind.takes_number else None
        self._trainer.forward_backward(self._trainer.model, batch, number)

    def _record(self, other: Sample) -> None:
        trainer, collectives, num_others = self._trainer, self._collectives, 0
        saved = counters_of(trainer)
        trainer.current_gradient_accumulation_steps = 1
        self.end_forward()
        with unchanged_random_state(trainer.args.device), alone(trainer):
            for sample in (self.sample, other):
                before = collectives.num_in_group
                collectives.start()
                self._alike(partial(self._forward_backward, sample))
                num_others = collectives.num_in_group - before - collectives.num_issued
                collectives.finish()
        put_back_counters(trainer, saved)
        for parameter in parameters_of(trainer.model, [trainer.optimizer]):
            parameter.grad = None
        if num_others:
            raise ConfigError(
                f"{type(trainer).__name__} with {type(trainer.model).__name__} has {num_others} collectives in a forward "
                f"and backward that are not FSDP's, for which ranks would wait if one ran out of memory; train with DDP"
            )

    def _without_targets_and_size(self, sample: Sample) -> tuple[bool, int]:
        batch = collated([sample], self._trainer.data_collator)
        size = sum(value.numel() for value in batch.values() if isinstance(value, torch.Tensor))
        return not self._kind.count(batch, 1), size
