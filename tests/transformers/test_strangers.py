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

from adaptive_batching import AdaptiveStep, ConfigError  # noqa: E402
from adaptive_batching.transformers import AdaptiveArguments  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402
from tests.transformers import strangers, trainers  # noqa: E402
from tests.transformers.strangers import HABITS, Habit  # noqa: E402

TOLERANCE = 1e-5

OF_OURS = {"adaptive", "_following", "_recording", "_begins", "_eval_loaders", "_evaluated", "loss_is_scaled_for_ga"}
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
    _, numbers, place, *_ = np.random.get_state(legacy=True)
    return torch.get_rng_state().tolist(), random.getstate(), (list(numbers), place)


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
            assert not differences(ours.before, after, OF_TRAINING), "a refusal leaves all as it was"
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


@pytest.mark.parametrize("name", HABITS)
def test_a_habit_trains_as_before_or_is_refused(name: str, tmp_path: Path) -> None:
    check(HABITS[name], tmp_path, HABITS[name].size)


@pytest.mark.parametrize(
    "name",
    [
        "dynamic rotary frequencies",
        "a sum in an attribute",
        "a list in an attribute",
        "data that draw",
        "targets of another name",
    ],
)
def test_a_probe_leaves_a_stranger_as_it_was(name: str, tmp_path: Path) -> None:
    check(HABITS[name], tmp_path, "auto")


@pytest.mark.parametrize("name", strangers.OF_TRL)
def test_a_trainer_of_trl_trains_as_before_or_is_refused(name: str, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="trl is not installed")
    check(strangers.OF_TRL[name], tmp_path, strangers.OF_TRL[name].size)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("two_ranks")
    return run_ranks(strangers.run_on_rank, folder, folder=folder)


@pytest.mark.xdist_group("strangers_two_ranks")
@pytest.mark.parametrize("name", strangers.ON_TWO_RANKS)
def test_a_habit_on_two_devices_trains_as_before_or_is_refused(name: str, ranks: list[dict[str, Any]]) -> None:
    expected = strangers.ON_TWO_RANKS[name].outcome
    (ours, stock), other = (ranks[0][name][kind] for kind in ("ours", "stock")), ranks[1][name]["ours"]
    if "refusal" in ours:
        assert other == ours, "both devices say the same"
        assert expected != strangers.SAME, ours["refusal"]
        assert re.search(expected, ours["refusal"]), ours["refusal"]
        return
    assert ours["digest"] == other["digest"], "both devices have the same weights"
    steps = [[each for each in one["logged"] if "loss" in each] for one in (ours, stock)]
    for one, its in zip(*steps, strict=True):
        for key in ("loss", "grad_norm"):
            assert one[key] == pytest.approx(its[key], rel=TOLERANCE), key
    assert ours["weights"] == pytest.approx(stock["weights"], rel=TOLERANCE, abs=1e-6)
    assert expected == strangers.SAME, "is the same, and was to be refused"


# --- what others are told


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


# --- plain loops


def make_step(loss: Any, max_tokens: int | None = 40) -> tuple[Any, AdaptiveStep[Any]]:
    model = trainers.make_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = AdaptiveStep(model, optimizer, loss, trainers.collate, length=lambda sample: len(sample["input_ids"]))
    step.max_tokens = max_tokens
    return model, step


def sum_and_number(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    number = (batch["labels"][:, 1:] != strangers.IGNORED).sum()
    return model(**batch).loss * number, number


def mean_times_samples(model: Any, batch: Any) -> tuple[torch.Tensor, int]:
    return model(**batch).loss * len(batch["labels"]), len(batch["labels"])


def gradient_of(model: Any) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("accumulated", [1, 4])
def test_accelerate_that_accumulates_takes_the_gradient_of_all_samples_or_is_refused(accumulated: int) -> None:
    from accelerate import Accelerator

    samples = trainers.make_data(8)
    model = trainers.make_llama()
    model(**trainers.collate(samples)).loss.backward()
    expected = gradient_of(model)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulated)
    model, step = make_step(sum_and_number)
    try:
        step.gradients(samples, accelerator.backward)
    except ConfigError as error:
        assert accumulated == 4
        assert "gradient_accumulation_steps" in str(error)
    else:
        torch.testing.assert_close(gradient_of(model), expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("alike", [0, 16])
def test_a_mean_times_samples_stops_a_plain_loop(alike: int) -> None:
    samples = trainers.make_data(96)
    samples[:alike] = [{"input_ids": [index % 90 + 1] * 10, "labels": [7] * 10} for index in range(alike)]
    _, step = make_step(mean_times_samples)
    taken = 0
    with pytest.raises(ConfigError, match=r"add up|off that of the same batch"):
        for start in range(0, 96, 8):
            step(samples[start : start + 8])
            taken += 1
    assert alike or not taken, "before any step, where the samples of the first tell"


def test_a_loss_that_sums_itself_in_an_attribute_has_the_mean_of_its_own() -> None:
    class Metered:
        total, number = torch.zeros(()), torch.zeros(())

        def __call__(self, model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
            loss, number = sum_and_number(model, batch)
            self.total, self.number = self.total + loss.detach(), self.number + number
            return loss, number

    loss = Metered()
    samples = trainers.make_data(24)
    _, step = make_step(loss, 60)
    step.find_maximum_batch_size(samples[0], upper=2)
    expected = 0.0
    for batch in (samples[:8], samples[8:16], samples[16:]):
        number = (trainers.collate(batch)["labels"][:, 1:] != strangers.IGNORED).sum()
        expected += float(step(batch) * number)
    assert loss.number == (trainers.collate(samples)["labels"][:, 1:] != strangers.IGNORED).sum()
    assert float(loss.total) == pytest.approx(expected, rel=1e-4)
