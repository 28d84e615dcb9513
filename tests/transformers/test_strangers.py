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
import transformers

from adaptive_batching import ConfigError
from adaptive_batching.transformers import AdaptiveArguments
from tests.support.changing import described, random_numbers
from tests.support.wide import few
from tests.transformers import strangers, trainers
from tests.transformers.strangers import HABITS, Habit

TOLERANCE = 1e-5

OF_OURS = {"adaptive", "_following", "_recording", "_begins", "_eval_loaders", "_evaluated", "loss_is_scaled_for_ga",
           "model", "optimizer"}  # fmt: skip
"""Attributes that a trainer has with ours only, and what is looked at by itself."""

OF_TRAINING = {"is_in_train", "_train_batch_size", "_memory_tracker", "model_wrapped", "_created_lr_scheduler",
               "_trial", "_signature_columns", "current_gradient_accumulation_steps"}  # fmt: skip
"""Attributes that ``train`` sets before it asks for data, or before each step."""


BY_LIBRARIES = {"_forward_hooks", "_output_capturing_hooks_installed"}
"""Attributes of modules that transformers sets in their first forward, and that stay."""


def state_of(trainer: Any) -> dict[str, Any]:
    """Return what a run of a trainer's code can change."""
    found = {f"trainer.{key}": described(value) for key, value in vars(trainer).items() if key not in OF_OURS}
    for path, module in trainer.model.named_modules():
        own = {key: value for key, value in vars(module).items() if key not in {"_modules", *BY_LIBRARIES}}
        found |= {f"{path}.{key}": described(value) for key, value in own.items()}
    return {**found, "random": random_numbers()}


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
    """Random numbers that would be drawn next, after training."""


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
    found.random = random_numbers()
    return found


def assert_equal(ours: Any, theirs: Any, initial: Mapping[str, torch.Tensor]) -> None:
    """Losses, norms of gradients and final weights are equal, and weights have moved alike."""
    trainers.assert_alike(ours, theirs, TOLERANCE, keys=("loss", "grad_norm"))
    if any("own" in each for each in trainers.logged(theirs)):  # of parts, which have unlike sizes
        trainers.assert_alike(ours, theirs, 1e-2, keys=("own",))
    found, expected = trainers.weights(ours), trainers.weights(theirs)
    assert found.keys() == expected.keys()
    moved = torch.cat([(expected[key] - initial[key]).flatten().double() for key in expected])
    apart = torch.cat([(found[key] - expected[key]).flatten().double() for key in expected])
    assert apart.norm() <= 10 * TOLERANCE * moved.norm(), f"weights are apart by {apart.norm() / moved.norm():.3g}"


def check(habit: Habit, folder: Path, size: int | str) -> None:
    """Train as the script does, whole, and with ours, in parts of a ``size``: alike, or not at all."""
    ours = run(habit, folder / "ours", AdaptiveArguments(micro_batch_size=size))
    if ours.refusal is not None:
        if ours.at_start is None and ours.trainer is not None:
            after = state_of(ours.trainer)
            assert not differences(ours.before, after, OF_TRAINING | {habit.leaves}), "a refusal leaves all as it was"
        assert habit.outcome != strangers.SAME, ours.refusal
        assert re.search(habit.outcome, ours.refusal), ours.refusal
        assert "\n" not in ours.refusal
        assert "Adaptive" not in ours.refusal, "a trainer has the name that its user wrote"
        return
    # As many numbers are drawn if parts are as large.
    drawn = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 2} if habit.draws else {}
    stock = run(habit, folder / "stock", None, **drawn)
    initial = trainers.weights(habit.make(folder / "stock", None))
    assert_equal(ours.trainer, stock.trainer, initial)
    assert ours.at_start and stock.at_start
    drawn_by_then = {"random"} if habit.draws else set()  # by the collator, of the first step
    left = differences(ours.at_start, stock.at_start, OF_TRAINING | {"args", "train_dataset"} | drawn_by_then)
    assert not left, "measuring leaves all as it was"
    assert ours.random == stock.random


NARROW = (
    "Llama", "batch norm", "an average in an attribute", "class weights of tokens", "mean over padding",
    "mean of means", "two means over different numbers", "contrastive", "R-Drop", "gradient penalty",
    "a step of its own", "two steps", "a teacher that follows", "a collator that draws",
    "every fifth sample has targets, and a mean", "an optimizer in backward",
    "layers that thaw, and an average of weights",
)  # fmt: skip


@pytest.mark.parametrize("name", few(HABITS, *NARROW))
def test_a_habit_trains_as_before_or_is_refused(name: str, tmp_path: Path) -> None:
    check(HABITS[name], tmp_path, HABITS[name].size)


PROBED = (
    "dynamic rotary frequencies", "a sum and a count in attributes", "data that draw", "targets of another name",
    "a function that computes the loss",
)  # fmt: skip


@pytest.mark.parametrize("name", few(PROBED, "a sum and a count in attributes", "data that draw"))
def test_a_probe_leaves_a_stranger_as_it_was(name: str, tmp_path: Path) -> None:
    check(HABITS[name], tmp_path, "auto")


OF_TRL = few(
    strangers.OF_TRL, "SFT of answers", "DPO with aot", "KTO", "CPO", "CPO in half precision",
    "CPO without a mean of tokens", "GKD that generates",
)  # fmt: skip


@pytest.mark.parametrize("name", OF_TRL)
def test_a_trainer_of_trl_trains_as_before_or_is_refused(name: str, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="trl is not installed")
    check(strangers.OF_TRL[name], tmp_path, strangers.OF_TRL[name].size)


def test_where_accumulation_adds_means_up_the_line_that_says_so_names_the_factor(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours = trainers.make_trainer(
        tmp_path, AdaptiveArguments(micro_batch_size=3), model=trainers.make_bert(), gradient_accumulation_steps=4,
        per_device_train_batch_size=2, max_steps=1,
    )  # fmt: skip
    with caplog.at_level("INFO", "adaptive_batching"):
        ours.train()
    [line] = [record.getMessage() for record in caplog.records if "gradient_accumulation_steps" in record.getMessage()]
    assert re.search(r"\b4\b", line)


@pytest.mark.parametrize("name", few(["two means over different numbers", "ORPO"], "two means over different numbers"))
def test_two_means_are_found_where_whole_batches_are_accumulated(name: str, tmp_path: Path) -> None:
    if name in strangers.OF_TRL:
        pytest.importorskip("trl", reason="trl is not installed")
    whole = AdaptiveArguments(use_maximum_batch_size=True, max_batch_size=8)
    trainer = {**HABITS, **strangers.OF_TRL}[name].make(tmp_path, whole, gradient_accumulation_steps=2)
    with pytest.raises(ConfigError, match=strangers.TWO_MEANS):
        trainer.train()
