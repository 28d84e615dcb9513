"""A recipe for ``tune run`` that probes and trains under a real memory limit, and prints what happened.

Once the recipe is set up, the process may grow by ``extra_mib``. Then the probe runs, 20 steps of worst-case samples at
its answer, and one step of as many more as what is left free would hold, and two.
"""

import gc
import json
import resource
from functools import partialmethod
from typing import Any

import torch
from omegaconf import DictConfig
from torchtune import config

from adaptive_batching._memory import CpuMeter, _status
from adaptive_batching._out_of_memory import is_out_of_memory
from adaptive_batching._probe.sizes import ProbeResult
from adaptive_batching._torchtune.host import Host
from adaptive_batching._torchtune.probing import Probe
from adaptive_batching._torchtune.training_step import training_step
from recipes.full_finetune_single_device import FullFinetuneRecipeSingleDevice
from recipes.lora_finetune_single_device import LoRAFinetuneRecipeSingleDevice

NUM_STEPS = 20
find = Probe.result


def limited_probe(probe: Probe, extra_mib: int) -> Any:
    """In place of the recipe's: sets the limit just before it."""
    host = probe.host
    CpuMeter().release()
    state, before, data_before = snapshot(host), _status("RssAnon"), _status("VmData")
    resource.setrlimit(resource.RLIMIT_DATA, (data_before + extra_mib * 2**20, -1))
    result = find(probe)
    after = _status("RssAnon")
    states = [state for optimizer in host.optimizers for state in optimizer.state.values()]
    unchanged = all(map(torch.equal, state, snapshot(host))) and not states

    step = training_step(host, probe.sample, accumulates=False)
    run = step.bind(step.model, step.optimizers)
    for _ in range(NUM_STEPS):
        run(step.make_batch(result.batch_size))
    larger_fails = False
    free = extra_mib * 2**20 - (result.budget_bytes - data_before)
    try:
        run(step.make_batch(result.batch_size + 2 + int(free / bytes_per_sample(result))))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        larger_fails = True
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, -1))
    outcome = {
        "larger_fails": larger_fails,
        "unchanged": unchanged,
        "left_bytes": after - before,
        **result.to_dict(),
    }
    print("OUTCOME " + json.dumps(outcome), flush=True)
    raise SystemExit(0)


def bytes_per_sample(result: ProbeResult) -> float:
    """How the predicted peak rises from the answer on."""
    (b0, peak0), (b1, peak1) = result.predicted[-2:]
    return (peak1 - peak0) / (b1 - b0)


def snapshot(host: Host) -> list[torch.Tensor]:
    """Weights, buffers and the random state, copied."""
    tensors = [*host.model.parameters(), *host.model.buffers()]
    return [torch.get_rng_state(), *(t.detach().clone() for t in tensors if type(t.data) is torch.Tensor)]


@config.parse
def recipe_main(cfg: DictConfig) -> None:
    gc.freeze()  # else each collection goes through all that torch has made
    Probe.result = partialmethod(limited_probe, cfg.extra_mib)  # type: ignore[assignment, method-assign]
    lora = "lora" in cfg.model._component_
    recipe = (LoRAFinetuneRecipeSingleDevice if lora else FullFinetuneRecipeSingleDevice)(cfg=cfg)
    recipe.setup(cfg=cfg)


if __name__ == "__main__":
    recipe_main()
