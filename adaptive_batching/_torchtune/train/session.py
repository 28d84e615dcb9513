"""A run from its settings to its loop; each step hands its value on to the next.

    settings -> host -> sizing -> probed -> split policy -> batch schedule -> loop

With all fields unset only the host and the loop are made, and the run is stock's.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tqdm import tqdm

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._device import random_state, set_random_state
from adaptive_batching._memory import memory_meter
from adaptive_batching._probe.does_not_fit import require_room, within_memory_limit
from adaptive_batching._probe.sizing import Sizing
from adaptive_batching._report.events import Watcher
from adaptive_batching._report.record import Report
from adaptive_batching._step.audit import Audit
from adaptive_batching._step.limits import TokenLimit
from adaptive_batching._step.runner import StepRunner
from adaptive_batching._torchtune.stock import compiling
from adaptive_batching._torchtune.stock.host import Host, StockRun, TrainingHooks
from adaptive_batching._torchtune.stock.objective import Sums
from adaptive_batching._torchtune.train.collectives import collectives_of
from adaptive_batching._torchtune.train.exploring import settle_micro_batch_size
from adaptive_batching._torchtune.train.growing import Growth, Increase, StockSchedule, make_controller
from adaptive_batching._torchtune.train.loop import Loop, Training, TrainingLoop
from adaptive_batching._torchtune.train.probing import CacheInputs, Probed, find_maximum, sizing_of
from adaptive_batching._torchtune.train.recipe_work import parallel_of
from adaptive_batching._torchtune.train.rows import lay_end_to_end
from adaptive_batching._torchtune.train.splitting import MicroBatch, SplitPolicy, Splitter
from adaptive_batching._torchtune.train.training_step import batch_dependent_module
from adaptive_batching._torchtune.train.training_work import TrainingWork
from adaptive_batching._torchtune.train.validating import HeldOut, Validation
from adaptive_batching._values import ByLength, ConfigError, Explore, Whole

log = logging.getLogger(__name__)


@dataclass
class Session:
    """A run, and everything that it has settled on before it trains."""

    host: Host
    run: StockRun
    settings: AdaptiveBatchingConfig
    increase: Increase
    report: Report | None = None  # None with all fields unset
    stored: Mapping[str, Any] = field(default_factory=dict)  # state of the run that is resumed
    held_out: HeldOut | None = None
    growth: Growth | None = field(default=None, init=False)
    split_policy: SplitPolicy = field(init=False)
    _probed: Probed | None = field(default=None, init=False)
    _explored: int | str | None = field(default=None, init=False)
    _random_states: list[dict[str, Any]] = field(default_factory=list, init=False)
    _validation_limit: TokenLimit = field(default_factory=TokenLimit, init=False)

    def __post_init__(self) -> None:
        self.split_policy = SplitPolicy(is_stock=self.report is None)

    def settle(self, cache_inputs: CacheInputs) -> None:
        """Decide all that is decided before training: what fits, how batches are split, how they grow."""
        sizing = self._sizing(cache_inputs)
        self._prepare_host(sizing, cache_inputs)
        # Before memory is short or measured: the thread that watches progress bars takes some, and if it cannot start,
        # Python waits for good.
        tqdm(disable=True).close()
        if self.report is not None:
            self._check(sizing)
            self._lay_out(sizing, cache_inputs, self.report)

    def _sizing(self, cache_inputs: CacheInputs) -> Sizing:
        return sizing_of(self.host, self.run, self.settings, measures_noise=cache_inputs.measures_noise)

    def _prepare_host(self, sizing: Sizing, cache_inputs: CacheInputs) -> None:
        host, settings = self.host, self.settings
        if self.report is not None:
            host.objective.leave_stock()
            host.objective.equalize_collectives()
        if host.ranks.size > 1:
            collectives, why_not = collectives_of(
                host, settings, probes=sizing.probes, measures_noise=cache_inputs.measures_noise
            )
            self.host = host = replace(host, collectives=collectives, why_no_recovery=why_not)
        if settings.memory_limit is not None and parallel_of(host).agrees:
            with contextlib.suppress(NotImplementedError):  # of a device whose memory cannot be measured
                require_room(settings, memory_meter(host.device), host.ranks)

    def _check(self, sizing: Sizing) -> None:
        host, settings, increase = self.host, self.settings, self.increase
        if increase.noise_scale_every is not None and not host.objective.sums_gradients:
            raise ConfigError(
                f"the gradient noise scale, which {increase.reader} needs, is not measured in {host.name}; use an "
                "increase function that does not read it, and leave noise_scale_every unset"
            )
        check_that_splitting_is_exact(sizing, increase, self._batch_dependent)
        if isinstance(settings.micro_batch_size, (ByLength, Explore)) and not settings.padding:
            self.host = host = lay_end_to_end(host)
        compiling.prepare(host, sizes_vary=settings.grows or sizing.bounds_forwards)

    def _lay_out(self, sizing: Sizing, cache_inputs: CacheInputs, report: Report) -> None:
        host, run, settings, stored, split_policy = self.host, self.run, self.settings, self.stored, self.split_policy
        self._probed = probed = self._find_maximum(sizing, cache_inputs, report)
        size = probed.sizes.micro_batch_size
        controller = make_controller(host, run, self.increase, sizing.accumulation, probed.sizes, stored)
        if stored:
            self.run = run = replace(run, first_step=stored["global_step"])
            self._restore(stored)
        split_policy.capacity, split_policy.samples_at_longest = probed.capacity, probed.sizes.fits
        if isinstance(size, Explore):
            split_policy.size = chosen = settle_micro_batch_size(host, run, controller, split_policy, stored, report)
            self._explored = str(chosen) if isinstance(chosen, ByLength) else int(str(chosen))
            compiling.prepare(host, sizes_vary=settings.grows or isinstance(chosen, ByLength))
        else:
            split_policy.size = size
        self.growth = Growth(host, run, self.increase, controller, split_policy, stored)
        batch_schedule = self.growth.batch_schedule
        if batch_schedule.seen_in_epoch:
            at = run.first_epoch + batch_schedule.seen_in_epoch / batch_schedule.shape.samples
            sizes = {"batch_size": controller.batch_size, "global_batch_size": self.growth.global_batch_size}
            report.resume(run.first_step, epoch=at, **sizes)
        report.plan(batch_schedule.plan(run.first_epoch), decided=controller.decides_early)

    @functools.cached_property
    def _batch_dependent(self) -> Callable[[], str | None]:
        """Names what computes over the batch, which takes some forwards to find."""
        return functools.cache(functools.partial(batch_dependent_module, self.host))

    def _find_maximum(self, sizing: Sizing, cache_inputs: CacheInputs, report: Report) -> Probed:
        return find_maximum(self.host, self.run, sizing, cache_inputs, report)

    def loop(self, hooks: TrainingHooks, watchers: Sequence[Watcher] = ()) -> Loop:
        """Return the loop that trains; the record of the run is told what happens before ``watchers`` are."""
        schedule = self.growth or self._stock_schedule()
        watchers = [*watchers] if self.report is None else [self.report, *watchers]
        # Nothing may come in the way of checkpoints, which are saved outside of the limit.
        limited = functools.partial(within_memory_limit, self.settings, self.host.device)
        save_every = self.settings.save_every_n_steps
        return self._loop(Training(self.host, self.run, hooks, schedule, watchers, limited, save_every))

    def _stock_schedule(self) -> StockSchedule:
        return StockSchedule(self.host, self.run)

    def _loop(self, training: Training) -> Loop:
        validation = None
        if self.held_out is not None:
            probed = self._probed if self.settings.use_maximum_batch_size else None
            recovers = self.settings.recover_from_oom
            validation = Validation(
                self.host, self.held_out, self.run, self._validation_limit, probed, recovers=recovers
            )
        work = self._work(training, together=isinstance(self.split_policy.size, ByLength))
        # Uncompiled, flex attention holds a whole matrix of scores; what has stepped in its backward cannot run again.
        is_audited = not compiling.compiles_each_size(self.host.loader.dataset) and not self.host.steps_in_backward
        remedy = "leave micro_batch_size null and set a smaller batch_size, or take a loss that is a mean over tokens"
        audit = Audit(work, self.host.ranks, remedy, self.settings.audit_every) if is_audited else None
        return TrainingLoop(training, work, self._runner(work, audit), validation)

    def _work(self, training: Training, *, together: bool = False) -> TrainingWork:
        learns = self.growth is not None and not self.growth.batch_schedule.controller.decides_early
        splitter = Splitter(self.host, self.split_policy, learns=learns)
        return TrainingWork(self.host, splitter, training.schedule, self._batch_dependent, together=together)

    def _runner(self, work: TrainingWork, audit: Audit | None = None) -> StepRunner[Any, MicroBatch, Sums]:
        return StepRunner(
            work, self.split_policy.limit, parallel_of(self.host), audit=audit,
            recovers=self.settings.recover_from_oom,
            largest_that_ran=0 if self._probed is None else self._probed.tokens,
        )  # fmt: skip

    def finish(self) -> None:
        if self.report is not None:
            self.report.finish()

    def note_random_state(self) -> None:
        """Keep the random state of every rank for the checkpoint that is saved next."""
        if self.growth is not None:
            self._random_states = self.host.ranks.gather(random_state(self.host.device))  # only the first stores them

    def state_dict(self, global_step: int) -> dict[str, Any] | None:
        if self.growth is None:
            return None  # off is stock, its checkpoints included
        controller = self.growth.batch_schedule.controller
        stored = None if self._probed is None else self._probed.stored
        return {
            "batch_size": controller.batch_size,
            "maximum": controller.maximum,
            "probe": None if stored is None else json.dumps(stored.to_dict()),
            "configured_batch_size": self.run.batch_size,
            "global_step": global_step,
            "random_states": self._random_states,
            "explored": self._explored,
            "order": _order_of(self.host),
            "growth": self.growth.state_dict(),
            "forward_cost": self.split_policy.cost.state_dict(),
            "token_limit": self.split_policy.limit.state_dict(),
            "validation_limit": self._validation_limit.state_dict(),
        }

    def _restore(self, stored: Mapping[str, Any]) -> None:
        self.split_policy.limit.load_state_dict(stored["token_limit"])
        self.split_policy.cost.load_state_dict(stored["forward_cost"])
        self._validation_limit.load_state_dict(stored["validation_limit"])
        if stored["growth"]["within_epoch"] is not None:
            _warn_of_another_order(stored["order"], _order_of(self.host))
        ranks = self.host.ranks
        if len(stored["random_states"]) == ranks.size:
            set_random_state(stored["random_states"][ranks.rank], self.host.device)


def check_that_splitting_is_exact(
    sizing: Sizing, increase: Increase, batch_dependent: Callable[[], str | None]
) -> None:
    """Refuse to split the batches of a model that computes over the batch dimension."""
    if sizing.splits:
        what, remedy = f"micro_batch_size={sizing.settings.micro_batch_size}", "leave micro_batch_size unset"
        if sizing.settings.micro_batch_size == Whole():
            what, remedy = "adaptive_batching.grow_beyond_memory=True", "set grow_beyond_memory=False"
    elif increase.noise_scale_every is not None:
        what = f"measuring the gradient noise scale, for {increase.reader},"
        remedy = "take an increase function that does not read it, and leave noise_scale_every unset"
    else:
        return
    module = batch_dependent()
    if module is not None:
        raise ConfigError(
            f"{what} would change the result: {module} computes over the batch, so its parts do not add up; {remedy}"
        )


def _order_of(host: Host) -> dict[str, Any]:
    """Return what the order of the samples in an epoch depends on, by the key of the config that it comes from."""
    return {"dataset": len(host.loader.dataset), "shuffle": getattr(host.loader.sampler, "shuffle", None)}


def _warn_of_another_order(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for key, value in now.items():
        if before.get(key, value) != value:
            what = f"{value} samples in dataset, where" if key == "dataset" else f"{key}={value}, where it was"
            log.warning(
                "%s %s in the run being resumed: the epoch continues in another order, repeating some samples and "
                "skipping others; set %s back to keep the order",
                what, f"there were {before[key]}" if key == "dataset" else before[key], key,
            )  # fmt: skip
