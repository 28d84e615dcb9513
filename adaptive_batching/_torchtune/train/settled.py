"""Decisions that a run makes before training: checked, recorded, saved in checkpoints and restored from them."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._device import random_state, set_random_state
from adaptive_batching._memory.meter import memory_meter
from adaptive_batching._probe.does_not_fit import require_room
from adaptive_batching._probe.sizing import Sizing
from adaptive_batching._report.record import Report
from adaptive_batching._torchtune.stock.host import Host, StockRun
from adaptive_batching._torchtune.train.growing import Growth
from adaptive_batching._torchtune.train.probing import Probed
from adaptive_batching._torchtune.train.recipe_work import parallel_of
from adaptive_batching._torchtune.train.splitting import SplitPolicy
from adaptive_batching._values import ConfigError, Whole

log = logging.getLogger(__name__)


@dataclass
class Settled:
    """Decisions that a run has made before training. Each checkpoint holds their state at that moment."""

    host: Host
    run: StockRun
    probed: Probed
    split_policy: SplitPolicy
    growth: Growth
    _random_states: list[dict[str, Any]] = field(default_factory=list, init=False)

    def tell(self, report: Report) -> None:
        """Record where a resumed run goes on, and what is planned."""
        run, growth = self.run, self.growth
        schedule = growth.batch_schedule
        if schedule.seen_in_epoch:
            at = run.first_epoch + schedule.seen_in_epoch / schedule.shape.samples
            sizes = {"batch_size": schedule.controller.batch_size, "global_batch_size": growth.global_batch_size}
            report.resume(run.first_step, epoch=at, **sizes)
        report.plan(schedule.plan(run.first_epoch), decided=schedule.controller.decides_early)

    def note_random_state(self) -> None:
        """Keep the random state of every rank for the checkpoint that is saved next."""
        self._random_states = self.host.ranks.gather(random_state(self.host.device))  # only the first stores them

    def state_dict(self, global_step: int) -> dict[str, Any]:
        controller, stored = self.growth.batch_schedule.controller, self.probed.stored
        return {
            "batch_size": controller.batch_size,
            "maximum": controller.maximum,
            "probe": None if stored is None else json.dumps(stored.to_dict()),
            "configured_batch_size": self.run.batch_size,
            "global_step": global_step,
            "random_states": self._random_states,
            "order": _order_of(self.host),
            "growth": self.growth.state_dict(),
            "row_size": self.split_policy.row_size.state_dict(),
            "token_limit": self.split_policy.limit.state_dict(),
        }


def restore(stored: Mapping[str, Any], host: Host, split_policy: SplitPolicy) -> None:
    """Put back what a checkpoint holds of splitting and of random numbers; warn if the order of data is another."""
    split_policy.limit.load_state_dict(stored["token_limit"])
    split_policy.row_size.load_state_dict(stored["row_size"])
    if stored["growth"]["within_epoch"] is not None:
        _warn_of_another_order(stored["order"], _order_of(host))
    ranks = host.ranks
    if len(stored["random_states"]) == ranks.size:
        set_random_state(stored["random_states"][ranks.rank], host.device)


def before_memory_is_short(host: Host, settings: AdaptiveBatchingConfig) -> None:
    """Refuse a limit that leaves no room, and start what could not be started later."""
    if settings.memory_limit is not None and parallel_of(host).agrees:
        with contextlib.suppress(NotImplementedError):  # of a device whose memory cannot be measured
            require_room(settings, memory_meter(host.device), host.ranks)
    # The thread that watches progress bars takes some memory, and if it cannot start, Python waits for good.
    tqdm(disable=True).close()


def check_that_splitting_is_exact(sizing: Sizing, batch_dependent: Callable[[], str | None]) -> None:
    """Refuse to split the batches of a model that computes over the batch dimension."""
    what, remedy = f"micro_batch_size={sizing.settings.micro_batch_size}", "leave micro_batch_size unset"
    if sizing.settings.micro_batch_size == Whole():
        what, remedy = "adaptive_batching.grow_beyond_memory=True", "set grow_beyond_memory=False"
    if sizing.splits and (module := batch_dependent()) is not None:
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
