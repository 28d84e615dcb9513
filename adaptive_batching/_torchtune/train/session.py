"""A run from its settings to its loop; each step hands its value on to the next:
settings -> host -> sizing -> probed -> split policy -> batch schedule -> loop.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._report.events import Watcher
from adaptive_batching._report.record import Report
from adaptive_batching._step.audit import Audit
from adaptive_batching._step.limits import TokenLimit
from adaptive_batching._step.row_size import RowSize, first_row
from adaptive_batching._step.runner import StepRunner
from adaptive_batching._torchtune.stock import compiling
from adaptive_batching._torchtune.stock.host import Host, StockRun, TrainingHooks
from adaptive_batching._torchtune.train.collectives import collectives_of
from adaptive_batching._torchtune.train.exploring import explore_micro_batch_size
from adaptive_batching._torchtune.train.growing import Growth, Increase, make_controller
from adaptive_batching._torchtune.train.loop import TrainingLoop
from adaptive_batching._torchtune.train.probing import CacheInputs, find_maximum, sizing_of
from adaptive_batching._torchtune.train.recipe_work import parallel_of
from adaptive_batching._torchtune.train.rows import lay_end_to_end
from adaptive_batching._torchtune.train.settled import (
    Settled,
    before_memory_is_short,
    check_that_splitting_is_exact,
    restore,
)
from adaptive_batching._torchtune.train.splitting import SplitPolicy, Splitter
from adaptive_batching._torchtune.train.training_run import TrainingRun
from adaptive_batching._torchtune.train.training_step import batch_dependent_module
from adaptive_batching._torchtune.train.training_work import TrainingWork
from adaptive_batching._torchtune.train.validating import HeldOut, Validation
from adaptive_batching._values import ByLength, Explore

log = logging.getLogger(__name__)


class Session:
    """A run, and everything that it has settled on before it trains.

    Args:
        report: Of the run.
        stored: State of the run that is resumed; empty for a new one.
        held_out: Data of validations.
    """

    def __init__(
        self,
        host: Host,
        run: StockRun,
        settings: AdaptiveBatchingConfig,
        increase: Increase,
        report: Report,
        stored: Mapping[str, Any],
        held_out: HeldOut | None,
    ) -> None:
        self.host, self.run, self.settings, self.increase = host, run, settings, increase
        self.split_policy = SplitPolicy(
            row_size=RowSize(first_row(host.device.type)),
            balances_ranks=settings.balance_ranks,
        )
        self._report, self._stored, self._held_out = report, stored, held_out
        self.settled: Settled | None = None  # until it is
        self._training: TrainingRun | None = None  # until it begins
        self._explored: int | str | None = None
        self._validation_limit = TokenLimit()

    def settle(self, cache_inputs: CacheInputs) -> None:
        """Decide all that is decided before training: what fits, how batches are split, how they grow."""
        host, run, settings, increase = self.host, self.run, self.settings, self.increase
        report, stored, split_policy = self._report, self._stored, self.split_policy
        sizing = sizing_of(host, run, settings)

        host.objective.equalize_collectives()
        if host.ranks.size > 1:
            collectives, why_not = collectives_of(host, settings, probes=sizing.probes)
            self.host = host = replace(host, collectives=collectives, why_no_recovery=why_not)
        before_memory_is_short(host, settings)
        check_that_splitting_is_exact(sizing, self._batch_dependent)
        if isinstance(settings.micro_batch_size, (ByLength, Explore)) and not settings.padding:
            self.host = host = lay_end_to_end(host)
        compiling.prepare(host, sizes_vary=settings.grows or sizing.bounds_forwards)

        probed = find_maximum(host, run, sizing, cache_inputs, report)
        controller = make_controller(host, run, increase, sizing.accumulation, probed.sizes, stored)
        if stored:
            self.run = run = replace(run, first_step=stored["global_step"])
            restore(stored, host, split_policy)
            self._validation_limit.load_state_dict(stored["validation_limit"])

        split_policy.limit.bound, split_policy.samples_at_longest = probed.capacity, probed.sizes.fits
        size = probed.sizes.micro_batch_size
        if isinstance(size, Explore):
            size = explore_micro_batch_size(host, run, controller, split_policy, stored, report)
            self._explored = str(size) if isinstance(size, ByLength) else int(str(size))
            compiling.prepare(host, sizes_vary=settings.grows or isinstance(size, ByLength))
        split_policy.size = size

        growth = Growth(host, run, increase, controller, stored)
        self.settled = Settled(host, run, probed, split_policy, growth)
        self.settled.tell(report)

    def train(self, hooks: TrainingHooks, watchers: Sequence[Watcher] = ()) -> None:
        """Train; the record of the run is told what happens before ``watchers`` are."""
        host, run, settings = self.host, self.run, self.settings
        split_policy, settled, recovers = self.split_policy, self.settled, settings.recover_from_oom is not False
        assert settled is not None, "settle first"
        self._training = training = TrainingRun(host, run, hooks, settled.growth, settings, [self._report, *watchers])

        splitter = Splitter(host, split_policy)
        together = isinstance(split_policy.size, ByLength)
        work = TrainingWork(host, splitter, self._batch_dependent, together=together)
        # Uncompiled, flex attention holds a whole matrix of scores; what has stepped in its backward cannot run again.
        is_audited = not compiling.compiles_each_size(host.loader.dataset) and not host.steps_in_backward
        remedy = "leave micro_batch_size null and set a smaller batch_size, or take a loss that is a mean over tokens"
        audit = Audit(work, host.ranks, remedy, settings.audit_every) if is_audited else None
        runner = StepRunner(
            work, parallel_of(host), audit=audit, recovers=recovers,
            largest_that_ran=settled.probed.tokens,
        )  # fmt: skip

        validation = None
        if self._held_out is not None:
            probed = settled.probed if settings.use_maximum_batch_size else None
            validation = Validation(host, self._held_out, run, self._validation_limit, probed, recovers=recovers)
        TrainingLoop(training, work, runner, validation).run()

    def note_random_state(self) -> None:
        """Keep the random state of every rank for the checkpoint that is saved next."""
        assert self.settled is not None, "settle first"
        self.settled.note_random_state()

    def state_dict(self) -> dict[str, Any] | None:
        """Return what a checkpoint that is saved now holds; None before training."""
        if self.settled is None or self._training is None:
            return None
        state = self.settled.state_dict(self._training.global_step)
        return state | {"explored": self._explored, "validation_limit": self._validation_limit.state_dict()}

    @functools.cached_property
    def _batch_dependent(self) -> Callable[[], str | None]:
        """Names what computes over the batch, which takes some forwards to find."""
        return functools.cache(functools.partial(batch_dependent_module, self.host))
