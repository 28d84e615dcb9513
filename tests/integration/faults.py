"""Models that run out of memory where a test says, or note what they run on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchtune.models.llama2 import llama2, lora_llama2

from adaptive_batching import _state
from adaptive_batching._attention import SampleBounds
from adaptive_batching._ranks import fsdp

# What the next models do: where they run out of memory, and how often.
plan: dict[str, Any] = {}


def run_out() -> None:
    plan["times"] -= 1
    plan["now"] = False
    raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")


def arm(layer: nn.Module) -> None:
    """Make ``layer`` run out of memory as ``plan`` says: from the ``call``-th forward on, ``times`` times."""

    def before_forward(module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled() == plan.get("without_gradients", False) or _state.rehearsing:
            return  # what is rehearsed counts for nothing: see tests/step/test_audit.py for faults there
        plan["calls"] += 1
        bounds = kwargs.get("mask")  # of samples that lie end to end
        samples = len(bounds.lengths) if isinstance(bounds, SampleBounds) else args[0].shape[0]
        plan["now"] = plan["calls"] >= plan["call"] and plan["times"] > 0 and samples > plan.get("fits", 0)
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


def full_model(make: Callable[..., nn.Module] = llama2, **arguments: Any) -> nn.Module:
    model: Any = make(**arguments)
    arm(list(model.layers)[plan["layer"]])
    return model


class Counts(nn.CrossEntropyLoss):
    """A loss that grows with the number of its calls, in a buffer."""

    calls: torch.Tensor

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.calls += 1
        return super().forward(*args, **kwargs) * (1 + 0.01 * self.calls)


def lora_model(**arguments: Any) -> nn.Module:
    return full_model(lora_llama2, **arguments)


shapes_of_forwards: list[tuple[int, int]] = []
"""Rows and columns of the tokens of every training forward of a :func:`counting_model`"""


def counting_model(**arguments: Any) -> nn.Module:
    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        tokens = kwargs["tokens"]
        if torch.is_grad_enabled() and not _state.rehearsing:
            shapes_of_forwards.append((tokens.shape[0], tokens.shape[1]))

    model = llama2(**arguments)
    model.register_forward_pre_hook(note, with_kwargs=True)
    return model


def disarm() -> None:
    """Let the next models run."""
    plan.clear()
    plan.update(layer=0, call=1, times=0, calls=0, now=False, where="forward")


class CollectivesThatFail:
    """Let a collective of FSDP fail on this rank, once; a context.

    Args:
        kind: ``"gather"`` or ``"scatter"``.
        moment: ``"before"`` it is issued; ``"inside"`` the call, which then does not issue it, or ``"issued"``, where
            it had; while ``"waiting"`` for it, after the exchange, or before it: ``"lost"``; ``"after"`` all that.
            Or before it and again, while ``"draining"``.
        number: Which one of them, from 1, after :meth:`begin`.
    """

    def __init__(self, kind: str, moment: str, number: int) -> None:
        self._ours, self._base = {
            "gather": (fsdp._AllGather, fsdp._AllGatherBase),
            "scatter": (fsdp._ReduceScatter, fsdp._ReduceScatterBase),
        }[kind]
        self._moment = moment
        self._number = number
        self._left: int | None = None
        self._num_lost = 0
        self._again = ""
        self._stack = contextlib.ExitStack()

    def begin(self) -> None:
        self._left = self._number

    def __enter__(self) -> CollectivesThatFail:
        issue, call = self._base.__call__, self._ours.__call__
        room, num_issued, issue_rest = fsdp._check_room, fsdp._num_issued, fsdp._Collective.issue

        def fail_at(*moments: str) -> None:
            if self._left == 0 and self._moment in moments:
                self._left = None
                self._again = self._moment
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

        def fail_again_while(moment: str) -> None:
            if self._again == moment:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._left is not None:
                self._left -= 1
            work = call(*args, **kwargs)
            fail_at("after")
            return work

        def issued(*args: Any, **kwargs: Any) -> Any:
            fail_at("inside")
            if self._left == 0 and self._moment == "lost":
                self._num_lost += 1
                return Wait(lambda: fail_at("lost"))
            work = issue(*args, **kwargs)
            fail_at("issued")
            return Wait(work.wait, lambda: fail_at("waiting")) if self._left == 0 else work

        def checked(*args: Any) -> None:
            fail_at("before", "draining")
            room(*args)

        def drained(*args: Any) -> None:
            fail_again_while("draining")
            issue_rest(*args)

        for owner, name, function in (
            (self._ours, "__call__", counted), (self._base, "__call__", issued), (fsdp, "_check_room", checked),
            (fsdp._Collective, "issue", drained),
            (fsdp, "_num_issued", lambda *args: num_issued(*args) + self._num_lost),
            (fsdp.MicroBatchCollectives, "drain", without_allocating(fsdp.MicroBatchCollectives.drain)),
        ):  # fmt: skip
            self._stack.enter_context(mock.patch.object(owner, name, function))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


class Wait:
    """The handle of a collective; to wait for it takes what it is given."""

    def __init__(self, *steps: Callable[[], object]) -> None:
        self._steps = steps

    def wait(self) -> None:
        for step in self._steps:
            step()


def without_allocating(function: Any) -> Any:
    """``function``, which runs out of memory where it makes a tensor."""

    class OutOfMemory(TorchDispatchMode):
        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(name in str(operation) for name in ("empty", "zeros", "ones", "full", "clone")):
                raise RuntimeError(f"DefaultCPUAllocator: can't allocate memory in {operation}")
            return operation(*args, **(kwargs or {}))

    def run(*args: Any) -> None:
        with OutOfMemory():
            function(*args)

    return run
