"""What others' scripts do trains in parts as it does whole, or is refused; and measuring it leaves nothing behind."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra transformers)")

from adaptive_batching import ConfigError  # noqa: E402
from adaptive_batching.transformers import AdaptiveArguments  # noqa: E402
from tests.transformers import strangers, trainers  # noqa: E402
from tests.transformers.strangers import HABITS, Habit  # noqa: E402

TOLERANCE = 1e-5

OF_OURS = {"adaptive", "_following", "_recording", "loss_is_scaled_for_ga"}
"""Attributes that a trainer has with ours only."""

OF_TRAINING = {"is_in_train", "_train_batch_size", "_memory_tracker", "model_wrapped", "_created_lr_scheduler",
               "_trial", "_signature_columns", "current_gradient_accumulation_steps"}  # fmt: skip
"""Attributes that ``train`` sets before it asks for data, or before each step."""


def known(value: Any) -> Any:
    """Return a value of any attribute as something that can be compared with that of another trainer."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.detach().double().flatten().tolist() if value.is_floating_point() else (
            value.flatten().tolist()
        )
    if isinstance(value, Mapping):
        return {key: known(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [known(each) for each in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


def random_state() -> Any:
    numbers = np.random.get_state()[1:3]
    return torch.get_rng_state().tolist(), random.getstate(), [np.asarray(each).tolist() for each in numbers]


def state_of(trainer: Any) -> dict[str, Any]:
    """Return all that a run of a trainer's code can change."""
    found = {f"trainer.{key}": known(value) for key, value in vars(trainer).items() if key not in OF_OURS}
    for path, module in trainer.model.named_modules():
        for key, value in vars(module).items():
            is_hooks = "hooks" in key and isinstance(value, Mapping)
            found[f"{path}.{key}"] = len(value) if is_hooks else known(value)
    return {**found, "random": random_state()}


def differences(one: Mapping[str, Any], other: Mapping[str, Any], but: set[str] = frozenset()) -> list[str]:  # type: ignore[assignment]
    """Name what differs between two states."""
    keys = {key for key in one.keys() | other.keys() if key.removeprefix("trainer.") not in but}
    return sorted(key for key in keys if one.get(key, "missing") != other.get(key, "missing"))


class AtFirstStep(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Looks at a trainer where its first step begins."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.state: dict[str, Any] | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.state is None:
            self.state = state_of(self._trainer)


@dataclass
class Outcome:
    """What became of a script."""

    trainer: Any = None
    before: dict[str, Any] = field(default_factory=dict)
    """Before ``train``."""

    at_start: dict[str, Any] | None = None
    """Where the first step begins."""

    refusal: str | None = None
    random: Any = None
    """The state of random number generators after training."""


def run(habit: Habit, folder: Path, ours: AdaptiveArguments | None, **settings: Any) -> Outcome:
    """Run a script as a stranger does: make a trainer, and train."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(11)
    found = Outcome()
    try:
        found.trainer = habit.make(folder, ours, **settings)
        at_start = AtFirstStep(found.trainer)
        found.trainer.add_callback(at_start)
        found.before = state_of(found.trainer)
        try:
            found.trainer.train()
        finally:
            found.at_start = at_start.state
    except ConfigError as error:
        found.refusal = str(error)
    found.random = random_state()
    return found


def assert_equal(ours: Any, theirs: Any, initial: Mapping[str, torch.Tensor]) -> None:
    """Losses, norms of gradients and final weights are equal, and weights have moved alike."""
    keys = {key for each in trainers.logged(theirs) for key in ("loss", "grad_norm", "own") if key in each}
    trainers.assert_alike(ours, theirs, TOLERANCE, keys=tuple(sorted(keys)))
    found, expected = trainers.weights(ours), trainers.weights(theirs)
    assert found.keys() == expected.keys()
    moved = torch.cat([(expected[key] - initial[key]).flatten().double() for key in expected])
    apart = torch.cat([(found[key] - expected[key]).flatten().double() for key in expected])
    assert apart.norm() <= 10 * TOLERANCE * moved.norm(), f"weights are apart by {apart.norm() / moved.norm():.3g}"


def check(habit: Habit, folder: Path) -> None:
    """Train as the script does, whole, and with ours, in parts of unlike sizes; both come to the same, or ours refuse."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(11)
    if habit.draws:  # as many numbers are drawn if parts are as large
        parts, settings = 4, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    else:
        parts, settings = 3, {}
    ours = run(habit, folder / "ours", AdaptiveArguments(micro_batch_size=parts))
    if ours.refusal is not None:
        if ours.at_start is None and ours.trainer is not None:
            after = state_of(ours.trainer)
            assert not differences(ours.before, after, OF_TRAINING), "a refusal leaves all as it was"
        assert habit.outcome != strangers.SAME, ours.refusal
        assert re.search(habit.outcome, ours.refusal), ours.refusal
        assert "\n" not in ours.refusal
        return
    stock = run(habit, folder / "stock", None, **settings)
    initial = trainers.weights(habit.make(folder / "stock", None))
    assert_equal(ours.trainer, stock.trainer, initial)
    assert habit.outcome == strangers.SAME, "is the same, and was to be refused"
    assert ours.at_start and stock.at_start
    left = differences(ours.at_start, stock.at_start, OF_TRAINING | {"args", "train_dataset"})
    assert not left, "measuring leaves all as it was"
    assert ours.random == stock.random


@pytest.mark.parametrize("name", HABITS)
def test_a_habit_trains_as_before_or_is_refused(name: str, tmp_path: Path) -> None:
    check(HABITS[name], tmp_path)
