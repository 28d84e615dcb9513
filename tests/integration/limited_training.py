"""A recipe for ``tune run`` that trains under a real limit: the process may grow by ``extra_mib``, if positive.

With ``through_memory_limit`` the limit is that of our field, which the recipe sets by itself.
"""

import dataclasses
import gc
import resource
import sys

from omegaconf import DictConfig
from torchtune import config

from adaptive_batching._memory import CpuMeter, _status
from adaptive_batching._values import MemoryAmount
from adaptive_batching.torchtune import run_recipe
from recipes.full_finetune_single_device import FullFinetuneRecipeSingleDevice

MIB = 2**20


class Limited(FullFinetuneRecipeSingleDevice):
    def setup(self, cfg: DictConfig) -> None:
        self._extra_mib = cfg.extra_mib
        self._through_memory_limit = cfg.get("through_memory_limit", False)
        super().setup(cfg)

    def train(self) -> None:
        meter = CpuMeter()
        meter.release()
        before = meter.used_bytes()
        if self._through_memory_limit:
            limit = MemoryAmount(num_bytes=before + self._extra_mib * MIB)
            assert self._session is not None
            self._session.settings = dataclasses.replace(self._session.settings, memory_limit=limit)
        elif self._extra_mib > 0:
            resource.setrlimit(resource.RLIMIT_DATA, (_status("VmData") + self._extra_mib * MIB, -1))
        super().train()
        print(f"LIMIT AFTER {resource.getrlimit(resource.RLIMIT_DATA)[0]}")
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, -1))
        meter.release()
        print(f"GREW BY {(meter.used_bytes() - before) // MIB} MIB")


@config.parse
def recipe_main(cfg: DictConfig) -> None:
    gc.freeze()  # else each collection goes through all that torch has made
    run_recipe(Limited, cfg)


if __name__ == "__main__":
    sys.exit(recipe_main())
