"""Models that run out of memory where a test says."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchtune.models.llama2 import llama2, lora_llama2

# What the next models do: where they run out of memory, and how often.
plan: dict[str, Any] = {}


def run_out(error: str = "can't allocate memory") -> None:
    plan["times"] -= 1
    plan["now"] = False
    raise RuntimeError(f"[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: {error}")


def arm(layer: nn.Module) -> None:
    """Make ``layer`` run out of memory as ``plan`` says: from the ``call``-th forward on, ``times`` times."""

    def before_forward(module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        plan["calls"] += 1
        plan["now"] = plan["calls"] >= plan["call"] and plan["times"] > 0 and args[0].shape[0] > plan.get("fits", 0)
        if plan["now"] and plan["where"] == "forward":
            run_out()

    def after_accumulation(gradient: torch.Tensor) -> None:
        if plan["now"] and plan["where"] == "hook":
            run_out()

    def after_forward(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if output.requires_grad and plan["now"] and plan["where"] == "backward":
            output.register_hook(lambda gradient: run_out())

    layer.register_forward_pre_hook(before_forward, with_kwargs=True)
    layer.register_forward_hook(after_forward)
    for parameter in layer.parameters():
        parameter.register_post_accumulate_grad_hook(after_accumulation)


def full_model(**arguments: Any) -> nn.Module:
    model = llama2(**arguments)
    arm(list(model.layers)[plan["layer"]])
    return model


def lora_model(**arguments: Any) -> nn.Module:
    model = lora_llama2(**arguments)
    arm(list(model.layers)[plan["layer"]])
    return model


class WholeCrossEntropy(nn.CrossEntropyLoss):
    """The loss without chunks."""

    def __init__(self, **ignored: Any) -> None:
        super().__init__(ignore_index=-100)


def disarm() -> None:
    """Let the next models run."""
    plan.clear()
    plan.update(layer=0, call=1, times=0, calls=0, now=False, where="forward")
