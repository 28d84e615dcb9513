"""What takes less memory: settings of stock that keep fewer activations on the device, and the next one of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # which imports torch
    from adaptive_batching._torchtune.stock.host import Host

_CHECKPOINTING, _OFFLOADING = "enable_activation_checkpointing=True", "enable_activation_offloading=True"


def of_activations(*, checkpoints: bool, offloads: bool, can_offload: bool) -> list[tuple[str, str]]:
    """Return what is not used yet, as a name and what to add to the command line; what costs least comes first."""
    settings = [] if checkpoints else [("activation checkpointing", _CHECKPOINTING)]
    if can_offload and not offloads:
        both = "activation checkpointing and offloading", f"{_OFFLOADING} {_CHECKPOINTING}"
        settings.append(("activation offloading", _OFFLOADING) if checkpoints else both)
    return settings


def remedy(host: Host) -> str:
    """Return the next setting that saves memory, and what says before the next run whether it saves enough."""
    ways = host.objective.saves_memory_by
    can_offload = "offloading" in ways and host.device.type == "cuda"  # elsewhere stock refuses to
    unused = of_activations(
        checkpoints=host.checkpoints_activations, offloads=host.offloads_activations, can_offload=can_offload
    )
    otherwise = "a model with quantized weights, as in QLoRA" if "lora" in ways else "a smaller model"
    setting = unused[0][1] if unused else otherwise
    if not ways:
        return setting  # there are none for `plan` to try
    return f"{setting}; 'adaptive-batching plan', with the config and overrides of this run, says what fits"
