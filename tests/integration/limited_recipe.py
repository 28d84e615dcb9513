"""Recipes under a real memory limit: once one is set up, its process may grow by ``extra_mib``.

    python -m tests.integration.limited_recipe <folder> '{<name>: [<argument>, ...], ...}'

Each runs in a fork of this process, which has imported what they need, and prints to ``<name>.txt`` in the folder.
With ``only_probes`` it then probes, runs eight steps of worst-case samples at the answer, and steps of two, four, six
and eight more than what is left free would hold, until one runs out. Else it trains, under the limit of our field.
"""

import dataclasses
import json
import os
import resource
import sys
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torchtune import config

from adaptive_batching._memory.host_limits import status
from adaptive_batching._memory.meter import CpuMeter
from adaptive_batching._memory.out_of_memory import is_out_of_memory
from adaptive_batching._probe.does_not_fit import within_memory_limit
from adaptive_batching._probe.probed_step import TrainingStep
from adaptive_batching._probe.stored_probe import StoredProbe
from adaptive_batching._torchtune.stock.host import Host
from adaptive_batching._torchtune.train.probing import Probe
from adaptive_batching._torchtune.train.training_step import training_step
from adaptive_batching._values import MemoryAmount
from adaptive_batching.torchtune import run_recipe
from recipes.full_finetune_single_device import FullFinetuneRecipeSingleDevice
from recipes.lora_finetune_single_device import LoRAFinetuneRecipeSingleDevice
from tests.support.garbage import quicken_collections

MIB = 2**20
find = Probe.find


def limited_probe(probe: Probe, extra_mib: int) -> Any:
    """In place of the recipe's: sets the limit just before it."""
    host = probe.host
    CpuMeter().release()
    state, before, data_before = snapshot(host), status("RssAnon"), status("VmData")
    resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + extra_mib * MIB, -1))
    found: StoredProbe = find(probe)
    result = found.result
    after = status("RssAnon")
    states = [state for optimizer in host.optimizers for state in optimizer.state.values()]
    unchanged = all(map(torch.equal, state, snapshot(host))) and not states

    step = training_step(host, probe.sample, accumulates=False)
    for _ in range(8):
        step.run(step.make_batch(result.batch_size))
    (b0, peak0), *_, (b1, peak1) = [(m.batch_size, m.peak_bytes or 0) for m in result.measurements if m.fits][1:]
    free = extra_mib * MIB - (result.budget_bytes - data_before)
    filling = result.batch_size + int(free / ((peak1 - peak0) / (b1 - b0)))
    # By which the process may grow is more than was measured, where an allocator's pages are given back meanwhile.
    larger_fails = any(runs_out(step, filling + more) for more in (2, 4, 6, 8))
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, -1))
    seen = {"larger_fails": larger_fails, "unchanged": unchanged, "left_bytes": after - before}
    print("OUTCOME " + json.dumps({**seen, **result.to_dict()}), flush=True)
    raise SystemExit(0)


def runs_out(step: TrainingStep, size: int) -> bool:
    try:
        step.run(step.make_batch(size))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return True
    return False


def snapshot(host: Host) -> list[torch.Tensor]:
    """Weights, buffers and the random state, copied."""
    tensors = [*host.model.parameters(), *host.model.buffers()]
    return [torch.get_rng_state(), *(t.detach().clone() for t in tensors if type(t.data) is torch.Tensor)]


class Limited(FullFinetuneRecipeSingleDevice):
    def setup(self, cfg: DictConfig) -> None:
        self._extra_mib = cfg.extra_mib
        super().setup(cfg)

    def train(self) -> None:
        meter = CpuMeter()
        meter.release()
        if self._extra_mib > 0:
            limit = MemoryAmount(num_bytes=meter.used_bytes() + self._extra_mib * MIB)
            run = self._planned_run
            limited = dataclasses.replace(run.settings, memory_limit=limit)
            run.training.limited = partial(within_memory_limit, limited, run.host.device)
        super().train()
        print(f"LIMIT AFTER {resource.getrlimit(resource.RLIMIT_DATA)[0]}")


@config.parse
def recipe_main(cfg: DictConfig) -> None:
    if not cfg.get("only_probes", False):
        run_recipe(Limited, cfg)
        return
    Probe.find = partialmethod(limited_probe, cfg.extra_mib)  # type: ignore[assignment, method-assign]
    lora = "lora" in cfg.model._component_
    (LoRAFinetuneRecipeSingleDevice if lora else FullFinetuneRecipeSingleDevice)(cfg=cfg).setup(cfg=cfg)


if __name__ == "__main__":
    quicken_collections()
    for name, arguments in json.loads(sys.argv[2]).items():
        if os.fork():
            os.wait()
            continue
        with Path(sys.argv[1], f"{name}.txt").open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        sys.argv = [__file__, *arguments]
        recipe_main()
        break
