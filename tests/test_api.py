"""The public interface: the names and signatures that users rely on. A change here is a change for them."""

# ruff: noqa: E501 (signatures are as long as they are)

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

import adaptive_batching
from adaptive_batching import AdaptiveBatchingConfig, growth, torchtune
from tests.conftest import ROOT

EXPECTED = {
    adaptive_batching: """
AdaptiveBatchingConfig
AdaptiveBatchingConfig.decisions_per_epoch
AdaptiveBatchingConfig.grows
AdaptiveBatchingConfig.fills_memory
AdaptiveBatchingConfig.growth_is_bound_by_memory
AdaptiveBatchingConfig.enabled
AdaptiveBatchingConfig.probes
AdaptiveBatchingConfig.from_mapping(cls, section, *, use_maximum_batch_size=..., batch_increase_function=..., micro_batch_size=..., save_every_n_steps=..., batch_size=...)
AdaptiveBatchingError(Exception)
AdaptiveStep(model, optimizer, loss, collate=..., *, length=..., max_tokens=..., clip_norm=..., backward=...)
AdaptiveStep.max_tokens
AdaptiveStep.num_recoveries
AdaptiveStep.__call__(self, samples)
AdaptiveStep.gradients(self, samples)
AdaptiveStep.find_maximum_batch_size(self, sample, *, upper, in_parts=..., settings=...)
BatchController(batch_size, maximum, maximum_reason=..., increase=..., name=..., accumulation=...)
BatchController.decides_early
BatchController.without_growth(self)
BatchController.decide(self, state, room=...)
BatchController.announce(self, decision)
ConfigError(AdaptiveBatchingError, ValueError)
Course(controller, shape, rates=..., scale=..., *, initial_batch_size=..., grows_in_warmup=...)
Course.window
Course.accumulation
Course.lr_scale
Course.steps_per_epoch
Course.epoch_is_over
Course.run_is_over
Course.start_epoch(self, number, observe=...)
Course.progress(self)
Course.resume(self, number, progress)
Course.take_step(self)
Course.decide_if_due(self, observe=...)
Course.plan(self, first_epoch=...)
Course.expected(self)
Course.steps_left(self)
DoesNotFitError(AdaptiveBatchingError, RuntimeError)
FixedAccumulation(batches=...)
FixedAccumulation.batches_at(self, batch_size)
FixedAccumulation.window(self, batch_size)
FixedAccumulation.allowed(self, batch_size)
FixedAccumulation.room(self, samples)
GrowthState(epoch, total_epochs, batch_size, initial_batch_size, maximum, global_batch_size, samples_seen, steps, lr_decay, losses=..., val_losses=..., noise_scale=..., history=..., seconds_per_step=...)
IncreaseFunction
IncreaseFunctionError(AdaptiveBatchingError, ValueError)
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
RunShape(epochs, samples, replicas=..., max_steps=..., decisions=..., reference_steps=..., reference_samples=..., run_samples=...)
find_maximum_batch_size(model, optimizer, loss, make_batch, *, upper, config=...)
growth (module)
is_out_of_memory(error)
memory_meter(device)
plan_batch_sizes(batch_size, increase, *, epochs, samples, maximum=...)
""",
    growth: """
constant()
cosine(end=..., ramp_epochs=...)
fixed_increase(increase, epochs=...)
goodput(gain=...)
gradient_noise_scale(multiplier=..., hysteresis=...)
late_switch(fraction, end=...)
linear(end=..., ramp_epochs=...)
multistep(milestones, gamma=...)
norm_test(eta=...)
on_plateau(patience=..., rate=..., min_delta=..., cooldown=..., metric=...)
polynomial(end=..., ramp_epochs=..., power=...)
replace_lr_decay(alpha=...)
staged(stages)
step(every=..., gamma=...)
""",
    torchtune: """
AdaptiveBatching(cfg)
AdaptiveBatching.make_objective(parts)
AdaptiveBatching.validates
AdaptiveBatching.prepare(cfg)
AdaptiveBatching.setup(self, cfg)
AdaptiveBatching.train(self)
AdaptiveBatching.note_progress(self, *, epochs_run, global_step, steps_per_epoch)
AdaptiveBatching.learning_rate(self)
AdaptiveBatching.log_metrics(self, metrics, step)
AdaptiveBatching.save_epoch(self, epoch, *, is_last)
AdaptiveBatching.save_step(self, step, *, is_last)
AdaptiveBatching.cleanup(self)
AdaptiveBatching.load_checkpoint(self, *args, **kwargs)
AdaptiveEvaluation(cfg)
AdaptiveEvaluation.setup(self, cfg)
AdaptiveEvaluation.evaluate(self)
AdaptivePPO(cfg)
AdaptivePPO.log_rollout(self, trajectory, stats, divergence, tokens_per_second, added)
BatchStateInCheckpoint()
BatchStateInCheckpoint.save_checkpoint(self, epoch)
BatchesThatFit()
BatchesThatFit.settings
BatchesThatFit.loglikelihood_rolling(self, requests, disable_tqdm=...)
BatchesThatFit.generate_until(self, requests, disable_tqdm=...)
Counts(terms, tokens)
ManyDevices(cfg)
ManyDevices.profiles_steps
NextToken(collate, loss, activations, num_chunks=...)
Objective()
Objective.frozen_models
Objective.sums_gradients
Objective.saves_memory_by
Objective.tokens(self, sample)
Objective.counts(self, samples)
Objective.weight_of(self, batch)
Objective.size(self, sample)
Objective.is_text(self, sample)
Objective.stretch(self, sample, length)
Objective.filler(self, samples)
Objective.collate(self, samples)
Objective.loss(self, model, batch, weight)
Objective.smallest_batch(self, dataset)
Objective.leave_stock(self)
Objective.equalize_collectives(self)
Objective.forget(self)
Objective.batch_dependent_part(self)
Objective.begin_step(self, step, samples)
Objective.divisor(self, sums)
Objective.mean_loss(self, sums)
Objective.metrics(self, sums)
Objective.recompile(self, again)
Objective.for_trace(self, frozen_models)
StepCost(seconds, forwards, tokens, padded_tokens, peak_bytes)
Sums(loss, tokens, metrics=...)
Sums.map(self, function)
ThroughClient(cfg)
ThroughClient.save_checkpoint(self, epoch)
Watcher()
Watcher.epoch(self, **values)
Watcher.change(self, **values)
Watcher.cost(self, cost)
Watcher.step(self, epoch, step, samples, loss, lr, recoveries=...)
Watcher.validation(self, epoch, step, loss)
Watcher.noise(self, step, shown, noise_scale)
accept_configs_of_torchao()
check_ppo_settings(cfg)
distillation(parts)
entry_point(recipe_class, before=..., run=...)
fake_quantized(parts)
load_stock(name)
load_stock_evaluation()
preferences(parts)
recipe(name, objective=...)
run_evaluation(recipe_class, cfg, before=...)
run_recipe(recipe_class, cfg, before=...)
start_process_group(cfg)
""",
}


def described(package: Any, name: str) -> Iterator[str]:
    """Lines that say what a user can call: arguments without types, and ``=...`` for a default.

    What a public base has with the same arguments is left out.
    """
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
        bases = [base.__name__ for base in found.__mro__[1:] if base.__name__ in package.__all__]
        known = {line.removeprefix(f"{base}.") for base in bases for line in described(package, base)}
        for member, value in vars(found).items():
            if member.startswith("_") and member != "__call__":
                continue
            value = getattr(value, "__func__", value)  # of a classmethod
            line = f"{member}{arguments(value)}" if inspect.isfunction(value) else member
            if line not in known | fields:
                yield f"{name}.{line}"


def arguments(function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    parameters = [
        p.replace(annotation=p.empty, default=p.default if p.default is p.empty else ...)
        for p in signature.parameters.values()
    ]
    return str(inspect.Signature(parameters)).replace("=Ellipsis", "=...")


@pytest.mark.parametrize("module", EXPECTED, ids=lambda module: module.__name__)
def test_names_and_signatures_are_stable(module: ModuleType) -> None:
    lines = [line for name in module.__all__ for line in described(module, name)]
    assert "\n".join(lines) == EXPECTED[module].strip(), "\n".join(lines)


def test_what_is_not_public_is_private_by_name() -> None:
    modules = {name for _, name, _ in pkgutil.walk_packages(adaptive_batching.__path__, "adaptive_batching.")}
    public = {name for name in modules if not any(part.startswith("_") for part in name.split("."))}
    assert public == {module.__name__ for module in EXPECTED} - {"adaptive_batching"}
    for module in EXPECTED:
        names = {name for name in vars(module) if not name.startswith("_")} - {"growth", "torchtune"}
        assert names == set(module.__all__) - {"growth"}, module


def test_all_that_is_public_has_a_docstring_and_a_row() -> None:
    page = (ROOT / "docs" / "without-torchtune.md").read_text().split("## What is public")[1]
    for name in adaptive_batching.__all__:
        assert f"`{name}" in page, name
        assert getattr(adaptive_batching, name).__doc__ or name == "IncreaseFunction", name


def test_the_package_tells_type_checkers_that_it_is_typed() -> None:
    assert (ROOT / "adaptive_batching" / "py.typed").exists()
    for found in (getattr(module, name) for module in EXPECTED for name in module.__all__):
        if inspect.isfunction(found):
            untyped = [p.name for p in inspect.signature(found).parameters.values() if p.annotation is p.empty]
            assert not untyped, (found, untyped)
