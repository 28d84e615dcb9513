"""Optimizers of bitsandbytes in a config: what stands in for them where nothing is computed."""

from __future__ import annotations

import re
from typing import Any

from omegaconf import DictConfig, OmegaConf

from adaptive_batching._probe.block_wise import BlockWise
from adaptive_batching._values import ConfigError

_STATES = {"Adam": 2, "AdamW": 2, "Lion": 1, "SGD": 1, "RMSprop": 1, "Adagrad": 1, "LAMB": 2, "AdEMAMix": 3}


def without_kernels(optimizer: DictConfig) -> DictConfig:
    """Return ``optimizer`` of a config, or the component that stands in for one of bitsandbytes."""
    component = str(optimizer["_component_"])
    if not component.startswith("bitsandbytes."):
        return optimizer
    match = re.fullmatch(r"(Paged)?([A-Za-z]+?)(8bit|32bit)?", component.split(".")[-1])
    if match is None or match[2] not in _STATES:
        raise ConfigError(
            f"optimizer._component_={component} is not known to the plan; known are those of bitsandbytes called "
            f"{', '.join(_STATES)}, also Paged..., ...8bit"
        )
    arguments: dict[str, Any] = {
        "num_states": _STATES[match[2]], "bits": 8 if match[3] == "8bit" else 32, "paged": match[1] is not None,
        "lr": optimizer.get("lr"),
    }  # fmt: skip
    return OmegaConf.create({"_component_": f"{BlockWise.__module__}.BlockWise", **arguments})
