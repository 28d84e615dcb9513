"""What a sharded model communicates in a forward and backward, learned before training."""

from __future__ import annotations

import logging
from functools import partial

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._device import unchanged_random_state
from adaptive_batching._memory.unused_memory import release_workspaces
from adaptive_batching._ranks.fsdp import MicroBatchCollectives, is_sharded, why_not_drained
from adaptive_batching._step.data_parallel import record_collectives
from adaptive_batching._torchtune.stock.host import Host
from adaptive_batching._torchtune.stock.less_memory import remedy
from adaptive_batching._torchtune.train.recipe_work import forward_backward
from adaptive_batching._values import ConfigError

log = logging.getLogger(__name__)


def collectives_of(
    host: Host, settings: AdaptiveBatchingConfig, *, probes: bool
) -> tuple[MicroBatchCollectives | None, str]:
    """Return what makes running out of memory survivable on every rank; None, and the reason, if there is nothing."""
    why, recovers = _why_not_possible(host), settings.recover_from_oom is not False
    if why and probes:
        raise ConfigError(
            f"the largest batch cannot be probed on several devices: {why}. Set use_maximum_batch_size=False and, to "
            "grow, adaptive_batching.max_batch_size"
        )
    if why:
        if recovers:
            log.warning("recovery from out-of-memory errors is off: %s", why)
        return None, why
    if not recovers and not probes:
        return None, ""
    # Those of a forward and backward of a few tokens, which leaves nothing behind.
    collectives = MicroBatchCollectives(host.models)
    with unchanged_random_state(host.device):  # samples of images may be augmented
        batch = host.objective.smallest_batch(host.loader.dataset)
    parameters = list(host.model.parameters())
    record_collectives(collectives, partial(forward_backward, host, batch), parameters, host.device, remedy(host))
    release_workspaces(host.device)
    return collectives, ""


def _why_not_possible(host: Host) -> str:
    if host.steps_in_backward:
        return "optimizer_in_bwd=True updates parameters before a rank knows that another ran out of memory"
    if host.tensor_parallel:
        return "tensor_parallel_dim above 1 has collectives within each layer, which cannot be issued again"
    if not all(map(is_sharded, host.models)):
        return "the model is not sharded by FSDP2"
    return why_not_drained()
