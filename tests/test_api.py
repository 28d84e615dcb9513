"""The public interface: the names and signatures that users rely on. A change here is a change for them."""

# ruff: noqa: E501 (signatures are as long as they are)

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import adaptive_batching
from adaptive_batching import AdaptiveBatchingConfig, growth
from tests.conftest import ROOT

EXPECTED = """
AdaptiveBatchingConfig
AdaptiveBatchingConfig.decisions_per_epoch
AdaptiveBatchingConfig.grows
AdaptiveBatchingConfig.fills_memory
AdaptiveBatchingConfig.growth_is_bound_by_memory
AdaptiveBatchingConfig.enabled
AdaptiveBatchingConfig.probes
AdaptiveBatchingConfig.from_mapping(cls, section, *, use_maximum_batch_size=..., batch_increase_function=..., micro_batch_size=..., save_every_n_steps=..., batch_size=...)
AdaptiveStep(model, optimizer, loss, collate=..., *, length=..., max_tokens=..., clip_norm=..., backward=...)
AdaptiveStep.num_recoveries
AdaptiveStep.__call__(self, samples)
AdaptiveStep.gradients(self, samples)
AdaptiveStep.find_maximum_batch_size(self, sample, *, upper, in_parts=..., settings=...)
BatchController(batch_size, maximum, maximum_reason=..., increase=..., name=..., accumulation=..., ask=...)
BatchController.decides_early
BatchController.without_growth(self)
BatchController.decide(self, state, room=...)
BatchController.announce(self, decision)
ConfigError(ValueError)
Course(controller, shape, rates=..., scale=..., *, initial_batch_size=..., grows_in_warmup=...)
Course.window
Course.accumulation
Course.lr_scale
Course.steps_per_epoch
Course.epoch_is_over
Course.seen_in_epoch
Course.steps_in_epoch
Course.run_is_over
Course.start_epoch(self, number, observe=...)
Course.progress(self)
Course.resume(self, number, progress)
Course.take_step(self)
Course.decide_if_due(self, observe=...)
Course.plan(self, first_epoch=...)
Course.expected(self)
Course.steps_left(self)
DoesNotFitError(RuntimeError)
FixedAccumulation(batches=...)
FixedAccumulation.batches_at(self, batch_size)
FixedAccumulation.window(self, batch_size)
FixedAccumulation.allowed(self, batch_size)
FixedAccumulation.room(self, samples)
GrowthState(epoch, total_epochs, batch_size, initial_batch_size, maximum, global_batch_size, samples_seen, steps, lr_decay, losses=..., val_losses=..., noise_scale=..., history=..., seconds_per_step=...)
IncreaseFunction
IncreaseFunctionError(ValueError)
KeepGlobal(samples)
KeepGlobal.batches_at(self, batch_size)
KeepGlobal.window(self, batch_size)
KeepGlobal.allowed(self, batch_size)
KeepGlobal.room(self, samples)
ProbeResult(batch_size, reason, budget_bytes, total_bytes, search, seconds, measurements, predicted=..., shorter=..., enough=..., peak_moment=..., peak_kinds=...)
ProbeResult.peak_bytes
ProbeResult.num_steps
ProbeResult.num_out_of_memory
ProbeResult.to_dict(self)
ProbeResult.from_dict(cls, values)
RunShape(epochs, samples, accumulation=..., replicas=..., max_steps=..., decisions=..., reference_steps=..., reference_samples=..., run_samples=...)
TrainingStep(model, optimizers, make_batch, bind, discard=..., vocabulary=..., compiles=..., keeps=..., on_cuda=..., can_be_traced=...)
TrainingStep.discard()
find_maximum_batch_size(step, config, meter, *, upper, upper_reason=..., include=..., coarse=..., enough=..., ranks=..., remedies=..., scratch=...)
growth (module)
is_out_of_memory(error)
memory_meter(device)
plan_batch_sizes(batch_size, increase, *, epochs, samples, maximum=...)
"""


def described(package: Any, name: str) -> Iterator[str]:
    """Lines that say what a user can call: arguments without types, and ``=...`` for a default."""
    found = getattr(package, name)
    if inspect.ismodule(found):
        yield f"{name} (module)"
    elif not inspect.isclass(found):
        yield f"{name}{arguments(found)}" if callable(found) and inspect.isfunction(found) else name
    elif issubclass(found, Exception):
        yield f"{name}({', '.join(base.__name__ for base in found.__bases__)})"
    else:
        # Its arguments are the settings, which have a page of their own.
        yield name if found is AdaptiveBatchingConfig else f"{name}{arguments(found)}"
        fields = {field.name for field in dataclasses.fields(found)} if dataclasses.is_dataclass(found) else set()
        for member, value in vars(found).items():
            if member.startswith("_") and member != "__call__":
                continue
            value = getattr(value, "__func__", value)  # of a classmethod
            if inspect.isfunction(value):
                yield f"{name}.{member}{arguments(value)}"
            elif member not in fields:
                yield f"{name}.{member}"


def arguments(function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    parameters = [
        p.replace(annotation=p.empty, default=p.default if p.default is p.empty else ...)
        for p in signature.parameters.values()
    ]
    return str(inspect.Signature(parameters)).replace("=Ellipsis", "=...")


def test_names_and_signatures_are_stable() -> None:
    lines = [line for name in adaptive_batching.__all__ for line in described(adaptive_batching, name)]
    assert "\n".join(lines) == EXPECTED.strip(), "\n".join(lines)


def test_all_that_is_public_has_a_docstring_and_a_row() -> None:
    page = (ROOT / "docs" / "without-torchtune.md").read_text().split("## What is public")[1]
    for name in adaptive_batching.__all__:
        assert f"`{name}" in page, name
        assert getattr(adaptive_batching, name).__doc__ or name == "IncreaseFunction", name


def test_the_package_tells_type_checkers_that_it_is_typed() -> None:
    assert (ROOT / "adaptive_batching" / "py.typed").exists()
    for name in (*adaptive_batching.__all__, *growth.__all__):
        found = getattr(adaptive_batching, name, None) or getattr(growth, name)
        if inspect.isfunction(found):
            untyped = [p.name for p in inspect.signature(found).parameters.values() if p.annotation is p.empty]
            assert not untyped, (name, untyped)
