"""Validation while training: the mean loss over the target tokens of a data set that is held out.

Training sees nothing of it. The model, its gradients and its mode, random numbers, the order of the data, memory
statistics and the limits that training has learned are as they would be without.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from torchtune import training
from tqdm import tqdm

from adaptive_batching._device import unchanged_random_state
from adaptive_batching._growth.increase import reads_val_loss
from adaptive_batching._ranks.agree import GroupError, Ranks
from adaptive_batching._ranks.fsdp import MicroBatchCollectives, end_forward
from adaptive_batching._step.data_parallel import record_collectives
from adaptive_batching._step.limits import TokenLimit
from adaptive_batching._step.row_size import RowSize, first_row
from adaptive_batching._step.runner import StepRunner
from adaptive_batching._torchtune.stock.data import Sample, SampleLoader
from adaptive_batching._torchtune.stock.host import Host, StockRun
from adaptive_batching._torchtune.stock.less_memory import remedy
from adaptive_batching._torchtune.stock.objective import Counts, Objective, Sums
from adaptive_batching._torchtune.train.growing import Increase
from adaptive_batching._torchtune.train.probing import Probed
from adaptive_batching._torchtune.train.recipe_work import (
    MicroBatch,
    RecipeWork,
    SplitPolicy,
    Splitter,
    batch_of,
    parallel_of,
    to_device,
)
from adaptive_batching._torchtune.train.settings import ValidationSettings
from adaptive_batching._torchtune.train.training_step import batch_dependent_module
from adaptive_batching._values import ByLength, ConfigError, Fixed

log = logging.getLogger(__name__)

# Forwards whose samples are loaded and sorted by length together, so that little is padded.
_LOOK_AHEAD = 16


@dataclass(frozen=True)
class HeldOut:
    loader: SampleLoader  # for its samples, collate function and ranks, not its order and batches
    objective: Objective  # the recipe's, with an own state, for batches of this data set
    every: int
    batch_size: int | None  # samples of a forward; None to follow the training batch
    longest: int  # number of its longest sample


def hold_out(
    settings: ValidationSettings, loader: SampleLoader, objective: Objective, model: nn.Module, ranks: Ranks
) -> HeldOut:
    """Return a data set to validate on. Each sample is read once, which takes less than a validation does.

    Refused is one that is empty, without a single target, or with a sample that is longer than a model takes.
    """
    size = len(loader.dataset)
    if size == 0:
        raise ConfigError("dataset_val is empty; check its source, split and filters")
    lengths, has_targets = [], False
    for index in tqdm(range(size), desc="Reading dataset_val", dynamic_ncols=True, **ranks.bar_options):
        sample = loader.dataset[index]
        lengths.append(len(objective.tokens(sample)))
        has_targets = has_targets or objective.counts([sample]).terms > 0
    if not has_targets:
        raise ConfigError(
            f"dataset_val has no target token in any of its {size} samples; check its columns, or raise "
            f"tokenizer.max_seq_len, which may cut the answers off"
        )
    longest = lengths.index(max(lengths))
    most = min(int(getattr(module, "max_seq_len", lengths[longest])) for module in (model, *objective.frozen_models))
    if lengths[longest] > most:
        raise ConfigError(
            f"dataset_val has a sample of {lengths[longest]} tokens, number {longest} (the first is 0), but the model "
            f"takes at most {most}; set tokenizer.max_seq_len={most}"
        )
    return HeldOut(loader, objective, settings.every, settings.batch_size, longest)


def check_validation(settings: ValidationSettings | None, increase: Increase, recipe: type | None) -> None:
    """Refuse validation where a recipe has none, and what reads its loss where it is not configured."""
    if settings is not None and recipe is not None and not getattr(recipe, "validates", True):
        raise ConfigError(
            f"run_val_every_n_steps={settings.every} cannot be used with {recipe.__name__}, whose loss is not a mean "
            "over target tokens; set run_val_every_n_steps=null"
        )
    if settings is None and increase.function is not None and reads_val_loss(increase.function):
        raise ConfigError(
            f"batch_increase_function={increase.name!r} with metric='val_loss' needs a validation; set dataset_val and "
            f"run_val_every_n_steps, or metric=loss"
        )


class ValidationWork(RecipeWork[list[Sample], Sums]):
    """Forwards of samples that are held out, each weighted by its targets."""

    dataset, batch_key = "dataset_val", "batch_size_val"
    everything = "samples of dataset_val"

    def __init__(self, host: Host, splitter: Splitter, filler: Sample) -> None:
        super().__init__(host, functools.cache(partial(batch_dependent_module, host)))  # in evaluation mode
        self._splitter, self._filler, self.limit = splitter, filler, splitter.limit

    def parameters(self) -> list[nn.Parameter]:
        return []  # gradients are training's

    def split(self, samples: list[Sample]) -> Iterator[list[MicroBatch]]:
        """Yield micro-batches that weigh as much as they have targets."""
        longest_first = sorted(samples, key=self._host.objective.size, reverse=True)
        parts = []
        for part in self._splitter.split(longest_first or [self._filler]):
            terms = self._host.objective.counts(part.samples).terms if samples else 0
            if terms == 0:  # whose mean would be 0/0
                part = self.filler()
            parts.append(replace(part, weight=float(terms), num_tokens=terms))
        yield parts

    def filler(self) -> MicroBatch:
        return self._splitter.filler([self._filler])

    def runs(self, parts: Sequence[MicroBatch]) -> list[Callable[[], Sums]]:
        return [partial(self._forward, part) for part in parts]

    def _forward(self, part: MicroBatch) -> Sums:
        objective = self._host.objective
        batch = batch_of(objective, part)
        to_device(batch, self._host.device)
        with self._host.taking_rows():
            _, sums = objective.loss(self._host.model, batch, part.weight)
        end_forward(self._host.models)
        return replace(sums, tokens=torch.full_like(sums.tokens, part.num_tokens or 0))


class Validation:
    """Computes the loss of a model on a data set that is held out.

    Each rank takes every n-th sample; none is repeated, and a rank that has fewer makes up for it with forwards of
    weight 0. A forward that runs out of memory runs again in smaller parts, which ``limit`` remembers. ``probed`` is
    None if the training batch keeps its size.
    """

    def __init__(
        self, host: Host, held_out: HeldOut, run: StockRun, limit: TokenLimit, probed: Probed | None, *, recovers: bool
    ) -> None:
        if failure := host.ranks.connect():
            raise GroupError(failure)
        held_out.objective.equalize_collectives()
        self._host = host = replace(
            host, objective=held_out.objective, loader=held_out.loader, backward_optimizers=None
        )
        self._loader, self._objective = held_out.loader, held_out.objective
        self._every, self._longest = held_out.every, held_out.longest
        self._models = host.models
        first, self._replicas = int(self._loader.sampler.rank), int(self._loader.sampler.num_replicas)
        self._indices = range(first, len(self._loader.dataset), self._replicas)
        with unchanged_random_state(host.device):
            sample = self._loader.dataset[0]
        most_samples = held_out.batch_size or (run.batch_size if probed is None else probed.sizes.maximum)
        self._window = most_samples * (_LOOK_AHEAD if self._objective.is_text(sample) else 1)
        size, rows = Fixed(held_out.batch_size or run.batch_size), RowSize(first_row(host.device.type))
        split_policy, tokens = SplitPolicy(size, limit=limit, row_size=rows), 0
        if held_out.batch_size is None and probed is not None and probed.tokens:
            # A forward alone takes less memory than a training step, so that it needs no probe of its own.
            split_policy.size, limit.bound = ByLength(), probed.tokens
            tokens = probed.tokens
        self._logs_peak_memory = run.logs_peak_memory
        self._peaks: dict[str, float] = {}
        self._runner = StepRunner(
            ValidationWork(host, Splitter(host, split_policy), self._objective.filler([sample])),
            parallel_of(host, self._record_forward()), recovers=recovers, largest_that_ran=tokens,
        )  # fmt: skip

    def is_due(self, step: int) -> bool:
        return step % self._every == 0

    def check_that_longest_fits(self) -> None:
        """Run the longest sample alone, before training: nothing smaller could run in its place at a validation.

        A compiled model is left alone: what it compiles first has an effect on what it compiles for training.
        """
        if not self._host.is_compiled:
            with self._apart_from_training():
                self._run_window([self._longest])

    def run(self) -> float:
        """Return the mean loss over all target tokens of the data set, the same on every rank."""
        start = time.perf_counter()
        with self._apart_from_training():
            sums = self._sum_over_samples()
        tokens = int(sums.tokens)
        share = self._objective.weight_of(Counts(tokens, tokens)) / tokens
        loss = float(self._objective.mean_loss(replace(sums.map(lambda value: value * share), tokens=sums.tokens)))
        log.info("val_loss %.4f (%d samples, %.1f s)", loss, len(self._loader.dataset), time.perf_counter() - start)
        return loss

    def with_peaks_before(self, peaks: dict[str, float]) -> dict[str, float]:
        """Return ``peaks`` of memory as they are with those of training before the last validation."""
        kept, self._peaks = self._peaks, {}
        return {name: max(value, kept.get(name, 0.0)) for name, value in peaks.items()}

    def _sum_over_samples(self) -> Sums:
        most_on_a_rank = -(-len(self._loader.dataset) // self._replicas)
        windows = [self._indices[at : at + self._window] for at in range(0, most_on_a_rank, self._window)]
        sums = functools.reduce(operator.add, map(self._run_window, windows))
        return functools.reduce(operator.add, self._host.ranks.gather(sums))

    def _run_window(self, indices: Sequence[int]) -> Sums:
        done = self._runner.run(self._loader.load(indices))
        on_host = [sums.map(lambda value: value.cpu().double()) for _, sums in done]
        return functools.reduce(operator.add, on_host)

    def _record_forward(self) -> MicroBatchCollectives | None:
        """Record what a forward of a sharded model issues, so that a rank can issue it for the others."""
        if self._host.collectives is None:
            return None
        collectives = self._host.collectives.of_forwards()

        def forward() -> None:
            batch = self._objective.smallest_batch(self._loader.dataset)
            to_device(batch, self._host.device)
            with torch.no_grad():
                self._objective.loss(self._host.model, batch, 1.0)

        record_collectives(collectives, forward, [], self._host.device, remedy(self._host))
        end_forward(self._models)
        return collectives

    @contextlib.contextmanager
    def _apart_from_training(self) -> Iterator[None]:
        device = self._host.device
        if self._logs_peak_memory:
            self._peaks = self.with_peaks_before(training.get_memory_stats(device=device))
        modes = [(module, module.training) for model in self._models for module in model.modules()]
        for model in self._models:
            model.eval()
        try:
            with unchanged_random_state(device), torch.no_grad():
                yield
        finally:
            for module, mode in modes:
                module.training = mode
            if device.type != "cpu":  # else training's allocator would have to start over to find room
                torch.get_device_module(device).empty_cache()
            if self._logs_peak_memory:
                training.get_memory_stats(device=device)  # resets them
