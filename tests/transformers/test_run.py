"""A run as a whole: sizes that are probed, that grow, that are resumed, and evaluation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from adaptive_batching import ConfigError, DoesNotFitError, IncreaseFunctionError
from adaptive_batching._step.forward_times import ForwardTimes
from adaptive_batching.transformers import AdaptiveArguments
from tests.support.wide import few, wide
from tests.transformers import strangers, trainers
from tests.transformers.trainers import OutOfMemory, assert_alike, assert_same, growing, losses, make_trainer, trained


@pytest.mark.parametrize("padding", [True, False])
def test_a_probe_leaves_no_trace_and_what_it_finds_has_run_or_fits_by_far(padding: bool, tmp_path: Path) -> None:
    auto = AdaptiveArguments(micro_batch_size="auto", padding=padding)
    probed = make_trainer(tmp_path / "a", auto, gradient_accumulation_steps=2)
    watched = OutOfMemory(probed.model, 10**9)
    probed.train()
    found = probed.adaptive.probe
    assert found.search == "predict", "the step was traced"
    assert (found.batch_size, found.enough) == ((16, None) if padding else (1, 16)), "all samples of a step"
    assert probed.adaptive.max_tokens == 24 * 16
    assert torch.Size([16, 24] if padding else [1, 24]) in watched.forwards
    given = make_trainer(tmp_path / "b", auto, gradient_accumulation_steps=2)
    trainers.without_probe(given, probed.adaptive._known.stored)
    given.train()
    assert_same(probed, given)


def test_a_probe_goes_no_further_than_larger_forwards_are_of_use(
    probes_by_speed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {1: 0.03, 2: 0.05}  # the speed of a machine, the same everywhere
    note = ForwardTimes.note
    monkeypatch.setattr(ForwardTimes, "note", lambda self, samples, _: note(self, samples, seconds.get(samples, 1.0)))
    settings: dict[str, Any] = dict(per_device_train_batch_size=40, num_train_epochs=1)
    padded = AdaptiveArguments(micro_batch_size="auto", padding=True)
    ours = trained(tmp_path / "ours", padded, **settings)
    probe = ours.adaptive.probe
    assert [step.batch_size for step in probe.measurements] == [1, 2] and probe.enough == 36
    assert ours.adaptive.max_tokens == 36 * 24 and "larger ones would gain little" in str(ours.adaptive)
    stock = trained(tmp_path / "stock", **settings)
    assert_alike(ours, stock)


@pytest.mark.parametrize("skipped", few([0, 3], 3))
def test_a_gradient_scaler_scales_parts_and_a_probe_leaves_it_as_it_was(skipped: int, tmp_path: Path) -> None:
    scale = 2.0**10 if skipped == 0 else 2.0**127

    def make(folder: str, ours: AdaptiveArguments | None) -> Any:
        trainer = make_trainer(tmp_path / folder, ours)
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)
        return trainer

    stock = make("stock", None)
    stock.train()
    scaled = make("ours", AdaptiveArguments(micro_batch_size="auto"))
    OutOfMemory(scaled.model, 24 * 16, times=3)
    scaled.train()
    assert_alike(scaled, stock, keys=("loss", "learning_rate", "epoch"))
    assert sum(not math.isfinite(each["grad_norm"]) for each in losses(stock)) >= skipped
    assert [math.isfinite(each["grad_norm"]) for each in losses(scaled)] == [
        math.isfinite(each["grad_norm"]) for each in losses(stock)
    ]
    assert scaled.accelerator.scaler.get_scale() == stock.accelerator.scaler.get_scale() != scale


@pytest.mark.parametrize("accumulated", few([1, 2], 2))
def test_the_maximum_is_what_the_run_trains_with(accumulated: int, tmp_path: Path) -> None:
    settings: dict[str, Any] = dict(
        lr_scheduler_type="constant", warmup_steps=0, gradient_accumulation_steps=accumulated
    )
    stock = trained(tmp_path / "stock", per_device_train_batch_size=16, **settings)
    arguments = AdaptiveArguments(use_maximum_batch_size=True, max_batch_size=16)
    ours = trained(tmp_path / "ours", arguments, **settings)
    assert ours.adaptive.schedule.sizes == [16, 16]
    assert ours.adaptive.probe.batch_size == 16
    assert_alike(ours, stock)


@pytest.mark.parametrize("finds", few([True, False], True))
@pytest.mark.parametrize(("fits", "sizes"), [(17, [4, 8, 16, 16]), (3, [2, 2, 2, 2])])
def test_a_batch_that_grows_starts_as_configured_and_stays_within_the_maximum(
    fits: int, sizes: list[int], finds: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With ``use_maximum_batch_size`` or without, as in recipes; where more is configured than fits, from what does."""
    growth = AdaptiveArguments(use_maximum_batch_size=finds, batch_increase_function=trainers.DOUBLE)
    settings: dict[str, Any] = dict(per_device_train_batch_size=4, num_train_epochs=4)
    ours = make_trainer(tmp_path, growth, data=trainers.make_data(20), **settings)
    OutOfMemory(ours.model, 24 * fits)
    ours.train()
    batches = {each["epoch"]: each["batch_size"] for each in losses(ours) if each["epoch"].is_integer()}
    assert [*batches.values()] == ours.adaptive.schedule.sizes == sizes
    assert ours.adaptive.num_recoveries == 0
    assert ("per_device_train_batch_size=4 is above the maximum of 2, bound by memory" in caplog.text) == (fits == 3)


class Counting:
    """An increase function that counts its calls: it adds 4, then 8, then 12 samples, whatever the epoch."""

    def __init__(self) -> None:
        self.epochs: list[float] = []

    def __call__(self, epoch: int, current_batch_size: int) -> int:
        self.epochs.append(epoch)
        return 4 * (len(self.epochs) - 1)


def test_a_function_that_keeps_a_state_is_asked_once_for_each_epoch_and_trains_what_was_planned(tmp_path: Path) -> None:
    """Also where a run is planned twice, because ``max_steps`` is more than its epochs have."""

    def make(counting: Counting) -> Any:
        growth = AdaptiveArguments(batch_increase_function=counting, micro_batch_size=6)
        settings: dict[str, Any] = dict(num_train_epochs=2, max_steps=19, save_strategy="steps", save_steps=12)
        return make_trainer(tmp_path, growth, per_device_train_batch_size=4, **settings)

    first, second = Counting(), Counting()
    ours = make(first)
    ours.train()
    assert ours.adaptive.schedule.sizes == [4, 8, 16, 28]
    assert [each["batch_size"] for each in losses(ours)] == [4] * 10 + [8] * 5 + [16] * 3 + [28]
    assert first.epochs == [0, 1, 2, 3]
    resumed = make(second)
    resumed.train(str(tmp_path / "checkpoint-12"))
    assert resumed.adaptive.schedule.sizes == [4, 8, 8], "a new one adds nothing in its first call"
    assert second.epochs == [2], "epochs that have begun keep their sizes"
    assert [each["batch_size"] for each in losses(resumed)] == [4] * 10 + [8] * 9


@pytest.mark.parametrize("accumulated", few([1, 2], 2))
def test_a_loss_that_computes_over_the_batch_trains_where_no_batch_is_split(accumulated: int, tmp_path: Path) -> None:
    make = strangers.of_classes(strangers.contrastive, kind=strangers.AveragingTrainer)
    settings: dict[str, Any] = dict(gradient_accumulation_steps=accumulated, num_train_epochs=1)
    stock = make(tmp_path / "stock", None, per_device_train_batch_size=8, **settings)
    stock.train()
    never = {"batch_increase_function": lambda epoch, size: 0}
    for given in ({"use_maximum_batch_size": True}, never):
        arguments = AdaptiveArguments(**given, max_batch_size=8)
        ours = make(tmp_path / "ours", arguments, per_device_train_batch_size=8, **settings)
        ours.train()
        assert_alike(ours, stock)
    OutOfMemory(ours.model, 60)
    with pytest.raises(DoesNotFitError, match="splitting the batch would change the result: the loss of"):
        ours.train()
    with pytest.raises(ConfigError, match="neither a sum over num_items_in_batch nor a mean"):
        make(tmp_path / "split", AdaptiveArguments(micro_batch_size=4), **settings).train()


@pytest.mark.parametrize(("fits", "forwards"), [(16, [12, 12, 12, 4]), wide(32, [24, 16])])
def test_the_maximum_can_leave_what_the_optimizer_sees_as_it_is(fits: int, forwards: list[int], tmp_path: Path) -> None:
    settings: dict[str, Any] = dict(gradient_accumulation_steps=3, per_device_train_batch_size=8)
    stock = trained(tmp_path / "stock", **settings)
    section: dict[str, Any] = {"keep_global_batch": True, "search": "binary_search", "round_to_power_of_two": False}
    arguments = AdaptiveArguments(use_maximum_batch_size=True, **section)
    ours = make_trainer(tmp_path / "ours", arguments, **settings)
    OutOfMemory(ours.model, 24 * fits)
    watched = OutOfMemory(ours.model, 10**9)
    ours.train()
    assert_alike(ours, stock)
    assert [shape[0] for shape in watched.forwards[-len(forwards) :]] == forwards, "in the last epoch"
    assert {(each["batch_size"], each["global_batch_size"]) for each in losses(ours)} == {(forwards[0], 24)}


def test_a_growing_run_follows_its_schedule_by_samples_and_goes_on_where_it_was_left(tmp_path: Path) -> None:
    whole = growing(tmp_path / "whole", save_strategy="steps", save_steps=1)
    whole.train()
    schedule = whole.adaptive.schedule
    assert (schedule.sizes, schedule.batches, schedule.steps) == ([6, 12, 20], [7, 4, 2], [4, 2, 1])
    assert schedule.max_steps == 7
    assert [each["batch_size"] for each in losses(whole)] == [6, 6, 6, 6, 12, 12, 20]
    epochs = [each["epoch"] for each in losses(whole)]
    assert epochs == pytest.approx([2 / 7, 4 / 7, 6 / 7, 1, 1.5, 2, 3], abs=1e-4)
    before = [0.0, *epochs[:-1]]
    assert [each["learning_rate"] for each in losses(whole)] == pytest.approx(
        [3e-3 * (1 - e / 3) for e in before], 1e-4
    )
    for step in (2, 4, 5) if Version("5") <= Version(transformers.__version__) else (2, 4):  # see docs/works-with.md
        resumed = growing(tmp_path / f"from_{step}")
        resumed.train(str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert_same(resumed, whole, losses)
    with pytest.raises(ConfigError, match="resume with the data, the devices, per_device_train"):
        growing(tmp_path / "other", per_device_train_batch_size=9).train(str(tmp_path / "whole" / "checkpoint-5"))


class EndsAnEpochEarly(transformers.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop = state.global_step == 3


@pytest.mark.parametrize("step", few([3, 4, 8], 4))
def test_a_run_goes_on_where_it_was_left_after_a_callback_has_ended_an_epoch(step: int, tmp_path: Path) -> None:
    """In the last step of that epoch, within the next, and at the end of that."""
    ours = AdaptiveArguments(micro_batch_size=4)
    settings: dict[str, Any] = dict(num_train_epochs=3, save_strategy="steps", save_steps=step)
    whole = trained(tmp_path / "whole", ours, callbacks=[EndsAnEpochEarly()], **settings)
    resumed = make_trainer(tmp_path / "resumed", ours, callbacks=[EndsAnEpochEarly()], num_train_epochs=3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
    assert resumed.state.global_step == 13
    assert_same(resumed, whole, told=losses)
    other = make_trainer(tmp_path / "other", ours, per_device_train_batch_size=4, num_train_epochs=3)
    with pytest.raises(ConfigError, match="epochs were over after step"):
        other.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))


@pytest.mark.parametrize("saved", few(["epoch", "steps"], "steps"))
def test_a_run_that_max_steps_ended_within_an_epoch_goes_on_within_it(saved: str, tmp_path: Path) -> None:
    def run(folder: str, steps: int, **more: Any) -> Any:
        constant: dict[str, Any] = dict(lr_scheduler_type="constant", warmup_steps=0, save_strategy=saved, save_steps=5)
        settings: dict[str, Any] = dict(per_device_train_batch_size=4, num_train_epochs=3, max_steps=steps, **constant)
        return make_trainer(tmp_path / folder, AdaptiveArguments(micro_batch_size=3), **settings, **more)

    whole, first, resumed = run("whole", 20), run("first", 15), run("resumed", 20)
    whole.train()
    first.train()
    first.callback_handler.call_event("on_push_begin", first.args, first.state, first.control)  # as an upload after it
    resumed.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-15"))
    assert_same(resumed, whole, told=losses)


def test_max_steps_say_how_long_a_run_is_where_there_are_no_epochs(tmp_path: Path) -> None:
    settings: dict[str, Any] = dict(max_steps=3, num_train_epochs=0)
    assert_alike(
        trained(tmp_path / "ours", AdaptiveArguments(micro_batch_size=3), **settings),
        trained(tmp_path / "stock", **settings),
    )


def test_a_schedule_of_the_users_own_is_followed_alike_in_a_second_run(tmp_path: Path) -> None:
    """Its scale, too, multiplies the rate once."""
    ours = growing(tmp_path, lr_scaling="sqrt")
    optimizer = torch.optim.SGD(ours.model.parameters(), lr=1.0)
    ours.optimizer, rates = optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    ours.lr_scheduler = rates
    ours.train()
    schedule, steps = ours.adaptive.schedule, ours.state.global_step
    scale = math.sqrt(schedule.sizes[-1] / schedule.reference_size)
    for run in (1, 2):
        assert ours.lr_scheduler.last_epoch == run * steps
        rate = scale / (1 + schedule.scheduled(run * steps))
        assert scale > 1 and ours.lr_scheduler.get_last_lr() == [pytest.approx(rate)]
        if run == 1:
            ours.train()


def test_the_learning_rate_follows_the_batch(tmp_path: Path) -> None:
    plain, scaled = (growing(tmp_path / rule, lr_scaling=rule, max_steps=9) for rule in ("none", "sqrt"))
    plain.train()
    scaled.train()
    ratios = [
        one["learning_rate"] / other["learning_rate"] for one, other in zip(losses(scaled), losses(plain), strict=True)
    ]
    assert ratios == pytest.approx([1] * 4 + [math.sqrt(2)] * 2 + [math.sqrt(20 / 6)] * 3, rel=1e-6)
    assert plain.state.global_step == 9


def test_a_schedule_that_is_no_function_of_the_step_cannot_follow_growth(tmp_path: Path) -> None:
    ours = growing(tmp_path, lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="epoch",
                   eval_dataset=trainers.make_data(4), lr_scaling="sqrt")  # fmt: skip
    with pytest.raises(ConfigError, match="ReduceLROnPlateau is no function of the step"):
        ours.train()


def test_a_schedule_of_the_users_own_that_cannot_follow_is_refused_before_a_probe(tmp_path: Path) -> None:
    ours = make_trainer(tmp_path, AdaptiveArguments(use_maximum_batch_size=True))
    ours.optimizer = torch.optim.SGD(ours.model.parameters(), lr=1.0)
    ours.lr_scheduler = torch.optim.lr_scheduler.StepLR(ours.optimizer, 1)
    ran = OutOfMemory(ours.model, 10**9)
    with pytest.raises(ConfigError, match="StepLR is no function of the step"):
        ours.train()
    assert not ran.forwards


def test_a_function_that_reads_the_loss_is_refused(tmp_path: Path) -> None:
    plateau = {"_component_": "adaptive_batching.growth.on_plateau"}
    ours = make_trainer(tmp_path, AdaptiveArguments(batch_increase_function=plateau, micro_batch_size=4))
    with pytest.raises(IncreaseFunctionError, match="needs values that are known only during training"):
        ours.train()


@pytest.mark.parametrize("given", [wide({"micro_batch_size": "auto"}), {"use_maximum_batch_size": True}])
def test_a_step_of_more_samples_than_there_are_takes_them_all(given: dict[str, Any], tmp_path: Path) -> None:
    settings: dict[str, Any] = dict(per_device_train_batch_size=16, gradient_accumulation_steps=5)
    stock = trained(tmp_path / "stock", **settings)
    ours = trained(tmp_path / "ours", AdaptiveArguments(**given), **settings)
    assert_alike(ours, stock, keys=("loss", "grad_norm", "epoch"))


def test_ranks_with_other_settings_end_in_words_before_they_wait(tmp_path: Path) -> None:
    """Both ranks, as they tell each other."""
    trainer = make_trainer(tmp_path, AdaptiveArguments(micro_batch_size="auto"))
    trainer.adaptive.ranks.gather = lambda given: [given, {**given, "balance_ranks": False}]
    with pytest.raises(ConfigError, match=r"balance_ranks=None on rank 0 and False on rank 1 .* the same settings"):
        trainer.train()
