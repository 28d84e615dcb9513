"""Trainers that generate: in parts, and where memory runs out anywhere, they take the steps that TRL takes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOTrainer, RLOOConfig, RLOOTrainer

from adaptive_batching import ConfigError, DoesNotFitError
from adaptive_batching._step.row_size import first_row
from adaptive_batching._transformers.generated_rows import METHOD
from adaptive_batching._transformers.handed_out import replaced
from adaptive_batching.transformers import AdaptiveCallback, adaptive, adopt
from tests.support.wide import few, wide
from tests.transformers import generating
from tests.transformers.generating import (
    BATCH,
    difference,
    failing,
    fails_in_backward,
    logs_off,
    make,
    make_model,
    trained_once,
    weights,
)

RLOO = {"kind": RLOOTrainer, "config": RLOOConfig}
AUTO, THREE = "auto", {"micro_batch_size": 3}
KINDS: dict[str, dict[str, Any]] = {
    **{loss: {"loss_type": loss} for loss in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo")},
    "on policy": {"num_iterations": 1, "beta": 0.0},
    "of a sequence": {"importance_sampling_level": "sequence", "loss_type": "grpo"},
    "quantile": {"top_entropy_quantile": 0.5, "loss_type": "bnpo"},
    "entropy": {"entropy_coef": 0.1, "loss_type": "grpo"},
    "adaptive entropy": {"use_adaptive_entropy": True, "entropy_target": 4.5, "entropy_coef": 0.01},
    "masked": {"mask_truncated_completions": True, "loss_type": "bnpo"},
    "off-policy mask": {"off_policy_mask_threshold": 0.01},
    "generations": {"steps_per_generation": 4, "num_iterations": 1},
    "gpt2": {"model": "gpt2"},
    "checkpointed": {"gradient_checkpointing": True},
    "lora": {"lora": True},
    "masks of tools": {"rollout_func": generating.with_tools, "loss_type": "bnpo"},
    "rloo": RLOO,
}


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that returns a stock trainer of a kind once it has trained."""
    return trained_once(lambda name: trained(tmp_path_factory.mktemp("stock"), None, name))


def trained(folder: Path, ours: Any, name: str, **settings: Any) -> Any:
    trainer = made(folder, ours, name, **settings)
    trainer.train()
    return trainer


def made(folder: Path, ours: Any, name: str, **settings: Any) -> Any:
    given = {**KINDS[name], **settings}
    if "model" in given:
        given["model"] = make_model(given["model"])
    return make(folder, ours, **given)


def assert_as(stock: Any, ours: Any) -> None:
    assert difference(weights(stock), weights(ours)) < 2e-5  # Adam's first steps go by the sign of what nearly cancels
    off = logs_off(stock.seen_logs, ours.seen_logs)
    assert all(error < 2e-3 if key == "loss" else error < 1e-4 for key, error in off.items()), off  # losses cancel
    assert ours.rewards.calls == stock.rewards.calls


@pytest.mark.parametrize("name", few(KINDS, "dapo", "lora", "rloo"))
def test_updates_and_logs_are_those_of_trl_whatever_the_loss(name: str, stock: Any, tmp_path: Path) -> None:
    for ours in (AUTO, THREE):
        trainer = trained(tmp_path, ours, name)
        assert_as(stock(name), trainer)
        assert trainer.adaptive.num_recoveries == 0


def gradients(trainer: Any, batch: Any) -> list[torch.Tensor]:
    """Return that of TRL's loss of a whole batch, and that of its parts."""
    found = []
    for way in ("whole", "parts"):
        trainer.model.zero_grad()
        if way == "whole":
            with replaced(trainer, **{METHOD: trainer.adaptive.rows._method}):
                trainer._compute_loss(trainer.model, batch).backward()
        else:
            trainer.adaptive.step(trainer.model, batch)
        found.append(torch.cat([value.grad.flatten() for value in trainer.model.parameters()]).double())
    return found


@pytest.mark.parametrize("ours", [AUTO, wide(THREE)], ids=["auto", "3"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_gradient_of_a_batch_is_that_of_trls_loss_of_all_of_it(level: str, ours: Any, tmp_path: Path) -> None:
    trainer = trained(tmp_path, ours, "dapo", max_steps=1, learning_rate=0.01)
    trainer.model.train()
    trainer.importance_sampling_level = level
    batch = max(trainer._buffered_inputs, key=lambda batch: len(batch["completion_mask"].sum(1).unique()))
    for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"):
        trainer.loss_type = loss_type
        found = gradients(trainer, batch)
        # TRL's own gradient of vespo, with exponentials of sums of log-ratios, is as far from that in double precision.
        assert difference(*found) < (1e-5 if loss_type == "vespo" else 1e-6), loss_type


@pytest.mark.parametrize("without", ["advantages", "completion_mask"])
def test_a_quantile_is_that_of_the_batch_though_half_of_it_has_nothing_to_learn(without: str, tmp_path: Path) -> None:
    """As where all completions of a prompt have the same reward, or are masked because they are cut off."""
    trainer = trained(tmp_path, THREE, "quantile", beta=0.0, max_steps=1)
    trainer.model.train()
    batch = {**trainer._buffered_inputs[0], "advantages": torch.tensor([1.0, -1.0]).repeat(BATCH // 2)}
    batch[without] = batch[without].clone()
    batch[without][: BATCH // 2] = 0
    trainer.adaptive._rows_depend = False  # as if it were the first batch
    assert difference(*gradients(trainer, batch)) < 1e-6


def test_with_nothing_set_training_is_that_of_trl(stock: Any, tmp_path: Path) -> None:
    ours = trained(tmp_path, {}, "dapo")
    assert ours.adaptive is None
    assert torch.equal(weights(stock("dapo")), weights(ours))


def test_completions_are_packed_without_padding_where_a_model_honours_it(tmp_path: Path) -> None:
    trainer = made(tmp_path, AUTO, "dapo")
    shapes: list[tuple[int, int]] = []
    trainer.model.model.layers[0].register_forward_pre_hook(
        lambda module, args: shapes.append(tuple(args[0].shape[:2])) if torch.is_grad_enabled() else None
    )
    trainer.train()
    assert trainer.adaptive.rows.packed
    batches = trainer._buffered_inputs
    tokens = [int(batch["prompt_mask"].sum() + batch["completion_mask"].sum()) for batch in batches]
    assert shapes[-2:] == [(1, number) for number in tokens], "one row of all tokens"
    padded = trained(tmp_path, {"micro_batch_size": "auto", "padding": True}, "dapo")
    assert not padded.adaptive.rows.packed


def test_packed_completions_begin_in_rows_that_are_enough_and_not_in_all_that_fits(tmp_path: Path) -> None:
    of_64 = {"per_device_train_batch_size": 64, "gradient_accumulation_steps": 1, "num_iterations": 1, "max_steps": 1}
    trainer = made(tmp_path, AUTO, "dapo", **of_64)
    shapes: list[int] = []
    trainer.model.model.layers[0].register_forward_pre_hook(
        lambda module, args: shapes.append(args[0].shape[1]) if trainer._buffered_inputs is not None else None
    )
    trainer.train()
    probe = trainer.adaptive.probe
    assert probe.enough == 64 and probe.batch_size < 64, "the rest fits by far by what ran"
    assert max(shapes) <= first_row("cpu") < sum(shapes)
    assert difference(weights(trained(tmp_path, None, "dapo", **of_64)), weights(trainer)) < 1e-5


def test_what_is_probed_is_the_longest_prompt_of_all_and_not_of_the_first_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    trainer = made(tmp_path, AUTO, "dapo", max_steps=1, num_iterations=1)
    longest = [{"prompt": " ".join(["w5"] * (41 if row == 70 else 4))} for row in range(100)]
    trainer.train_dataset = Dataset.from_list(longest)
    trainer.train()
    assert max(batch["prompt_ids"].shape[1] for batch in trainer._buffered_inputs) < 41
    assert "of prompts of 41 tokens and 24 generated" in caplog.text


class Vllm:
    """Stands in for vLLM, which needs a GPU: it draws completions, with log-probabilities of its own."""

    def __init__(self, *, max_completion_length: int, **_: Any) -> None:
        self.most, self.draws = max_completion_length, random.Random(0)

    def sync_weights(self) -> None:
        pass

    def generate(self, prompts: list[list[int]], **_: Any) -> tuple[Any, Any, Any, Any]:
        lengths = [self.draws.randint(3, self.most) for _ in prompts]
        drawn = [[self.draws.randrange(2, 60) for _ in range(length)] for length in lengths]
        return prompts, drawn, [[[self.draws.uniform(-5, -3)] for _ in tokens] for tokens in drawn], None


@pytest.mark.parametrize("mode", few(["token_truncate", "sequence_mask"], "sequence_mask"))
def test_completions_of_vllm_are_learned_from_with_trls_correction(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", Vllm)
    of_vllm: dict[str, Any] = {"use_vllm": True, "vllm_importance_sampling_mode": mode, "loss_type": "dapo"}
    stock = make(tmp_path / "stock", None, **of_vllm)
    stock.train()
    trainer = make(tmp_path / "ours", AUTO, **of_vllm)
    ran = fails_in_backward(trainer, [1])
    trainer.train()
    assert len(ran) > 1 and trainer.adaptive.num_recoveries == 1
    assert any(key.startswith("sampling/importance_sampling_ratio") for key in trainer.seen_logs[0])
    assert_as(stock, trainer)


ALONE = {"recover_from_oom": True}
BROKEN_OFF = [f"{way}-{name}" for way in ("auto", "recovery")
              for name in ("dapo", "quantile", "adaptive entropy", "generations", "rloo")]  # fmt: skip


@pytest.mark.parametrize(
    "case", few(BROKEN_OFF, "auto-dapo", "auto-adaptive entropy", "recovery-dapo", "recovery-quantile")
)
def test_memory_that_runs_out_in_a_backward_ends_in_the_same_updates(case: str, stock: Any, tmp_path: Path) -> None:
    way, name = case.split("-")
    trainer = made(tmp_path, AUTO if way == "auto" else ALONE, name)
    ran = fails_in_backward(trainer, [1, 5])
    trainer.train()
    assert len(ran) > 5 and trainer.adaptive.num_recoveries == 2
    assert_as(stock(name), trainer)


def test_what_runs_again_draws_the_same_random_numbers(tmp_path: Path) -> None:
    """Bit for bit the run without the error, with dropout; memory was only scattered."""
    ended = []
    for at in ([], [5]):
        torch.manual_seed(3)
        trainer = make(tmp_path, {"micro_batch_size": 2}, model=make_model(dropout=0.2), num_iterations=1)
        fails_in_backward(trainer, at)
        trainer.train()
        ended.append(trainer)
    undisturbed, recovered = ended
    assert recovered.adaptive.num_recoveries == 1 and undisturbed.adaptive.num_recoveries == 0
    assert torch.equal(weights(undisturbed), weights(recovered))


def test_random_numbers_of_a_generation_within_a_step_are_not_drawn_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for at in ([], [7]):  # in the second batch of a step, before which TRL has generated
        torch.manual_seed(3)
        more: dict[str, Any] = {"num_iterations": 1, "steps_per_generation": 1, "max_steps": 3}
        trainer = make(tmp_path, {"micro_batch_size": 2}, **more)
        fails_in_backward(trainer, at)
        before: list[int] = []
        generate = trainer._generate_single_turn

        def noting(*args: Any, states: Any = before, stock: Any = generate, **kwargs: Any) -> Any:
            states.append(hash(bytes(torch.get_rng_state().tolist())))
            return stock(*args, **kwargs)

        monkeypatch.setattr(trainer, "_generate_single_turn", noting)
        trainer.train()
        found.append((before, weights(trainer)))
    assert trainer.adaptive.num_recoveries == 1
    assert found[0][0] == found[1][0] and difference(found[0][1], found[1][1]) < 2e-5


@pytest.mark.parametrize("name", few(["dapo", "rloo"], "dapo"))
def test_memory_that_runs_out_in_a_forward_of_any_kind_ends_in_the_same_updates(
    name: str, stock: Any, tmp_path: Path
) -> None:
    """Of the reference's, the old policy's and the policy's."""
    for at in (0, 1, 2, 4, 7):
        trainer = made(tmp_path, {"recover_from_oom": True}, name)
        with failing(trainer.adaptive.rows, "_method", [at]) as failed:
            trainer.train()
        assert failed == [at] and trainer.adaptive.num_recoveries == 1, at
        assert_as(stock(name), trainer)


def test_memory_that_runs_out_while_generating_takes_fewer_prompts_and_loses_none(tmp_path: Path) -> None:
    trainer = made(tmp_path, AUTO, "dapo", gradient_checkpointing=True)
    with failing(trainer.model, "generate", [0, 1]) as failed:
        trainer.train()
    assert failed == [0, 1] and trainer.adaptive.num_recoveries == 2
    assert trainer.state.global_step == 2 and trainer.rewards.calls == 1
    assert sum(len(batch["completion_ids"]) for batch in trainer._buffered_inputs) == 2 * BATCH
    assert trainer.model.is_gradient_checkpointing, "which TRL turns off to generate"


def test_what_does_not_fit_at_all_says_what_to_set(tmp_path: Path) -> None:
    trainer = made(tmp_path, {"recover_from_oom": True}, "dapo")
    with failing(trainer.model, "generate", range(9)), pytest.raises(DoesNotFitError, match="max_completion_length"):
        trainer.train()
    trainer = made(tmp_path, {"recover_from_oom": True}, "dapo")
    with (
        failing(trainer.adaptive.rows, "_method", range(2, 99)),
        pytest.raises(DoesNotFitError, match=r"1 completion of up to .* tokens.*max_completion_length"),
    ):
        trainer.train()


class InterruptsOnce(TrainerCallback):
    """Presses Ctrl-C within the first step."""

    pressed = False

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self.pressed:
            self.pressed = True
            raise KeyboardInterrupt


def test_a_run_after_one_that_was_interrupted_within_a_step_runs_nothing_of_it_again(tmp_path: Path) -> None:
    ended = []
    for ours in (None, THREE):
        trainer = made(tmp_path, ours, "dapo", callbacks=[InterruptsOnce()])
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        trainer._metrics["train"].clear()  # in which TRL keeps those of the batch that it had run
        if ours is not None:
            fails_in_backward(trainer, [1])
        trainer.train()
        ended.append(trainer)
    assert ended[1].adaptive.num_recoveries == 1
    assert_as(*ended)


def test_a_run_after_one_that_failed_before_it_began_is_probed(tmp_path: Path) -> None:
    trainer = made(tmp_path, AUTO, "dapo", max_steps=1)
    with failing(trainer.adaptive.rows, "_method", range(99)), pytest.raises(DoesNotFitError):
        trainer.train()
    trainer.train()
    assert trainer.adaptive.rows.packed and trainer.adaptive.probe is not None


def test_an_evaluation_that_runs_out_of_memory_has_the_loss_of_trl(stock: Any, tmp_path: Path) -> None:
    expected = made(tmp_path, None, "dapo", per_device_eval_batch_size=BATCH)
    data = expected.train_dataset.select(range(8))
    torch.manual_seed(5)
    loss = expected.evaluate(data)["eval_loss"]
    trainer = made(tmp_path, {"recover_from_oom": True}, "dapo", per_device_eval_batch_size=BATCH)
    torch.manual_seed(5)
    with failing(trainer.adaptive.rows, "_method", [0, 4]) as failed:
        assert trainer.evaluate(data)["eval_loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
    assert failed == [0, 4]


@pytest.mark.parametrize(
    ("ours", "settings", "message"),
    [
        ({"use_maximum_batch_size": True}, {}, "groups of completions whose rewards are compared.*micro_batch_size"),
        ({"batch_increase_function": "a.b"}, {}, "groups of completions"),
        ({"micro_batch_size": 2, "audit_every": 5}, {}, "audit_every=5 has no effect in GRPOTrainer"),
    ],
)
def test_what_cannot_run_in_parts_is_refused(ours: Any, settings: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        made(tmp_path, ours, "dapo", **settings)


class ComputesLoss(GRPOTrainer):  # type: ignore[misc]
    """Adds to TRL's loss where Trainer asks for it."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs) + 1


class ComputesLossOfPart(GRPOTrainer):  # type: ignore[misc]
    """Adds to TRL's loss where TRL computes it."""

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        return super()._compute_loss(model, inputs) + self.model.lm_head.weight.square().mean()


def test_a_compute_loss_of_somebodys_own_is_refused_rather_than_left_out(tmp_path: Path) -> None:
    told = r"ComputesLoss has a compute_loss of its own.*override _compute_loss instead"
    with pytest.raises(ConfigError, match=told):
        made(tmp_path, THREE, "dapo", kind=ComputesLoss)
    assert made(tmp_path, {}, "dapo", kind=ComputesLoss).adaptive is None
    assert made(tmp_path, THREE, "dapo", kind=ComputesLossOfPart).adaptive is not None


def test_a_trainer_that_is_there_becomes_adaptive(stock: Any, tmp_path: Path) -> None:
    plain = make(tmp_path)
    trainer = GRPOTrainer(
        model=str(tmp_path / "model"), args=plain.args, reward_funcs=plain.rewards, train_dataset=plain.train_dataset,
        processing_class=generating.tokenizer(),
    )  # fmt: skip
    assert adopt(trainer) is trainer and isinstance(trainer, adaptive(GRPOTrainer))
    trainer.train()
    assert trainer.adaptive.rows.packed
    with pytest.raises(ConfigError, match="leave out state"):
        adopt(make(tmp_path), state=[torch.nn.Linear(1, 1)])


def test_a_callback_makes_a_trainer_adaptive_before_trl_has_made_all_of_it(stock: Any, tmp_path: Path) -> None:
    trainer = make(tmp_path, None, callbacks=[AdaptiveCallback({"micro_batch_size": 3})], **KINDS["dapo"])
    trainer.train()
    assert trainer.adaptive.rule.samples == 3
    assert_as(stock("dapo"), trainer)


SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "steps_per_generation": 4, "max_steps": 3}


@pytest.mark.parametrize("name", few(["dapo", "rloo"], "dapo"))
def test_a_run_that_is_resumed_between_generations_goes_on_as_if_it_had_not_been_cut_off(
    name: str, tmp_path: Path
) -> None:
    """TRL alone would generate again, and ask for rewards again."""
    whole = trained(tmp_path, AUTO, name, num_iterations=1, **SAVING)
    checkpoints = [tmp_path / "out" / f"checkpoint-{step}" for step in (1, 2, 3)]
    kept = [bool([*each.glob("adaptive_batching_completions_*")]) for each in checkpoints]
    assert kept == [True, False, True], "nothing is left over after the second step"
    resumed = made(tmp_path / "resumed", AUTO, name, num_iterations=1, **SAVING)
    resumed.train(resume_from_checkpoint=str(checkpoints[0]))
    assert difference(weights(whole), weights(resumed)) < 1e-6
    off = logs_off(whole.seen_logs[1:], resumed.seen_logs)
    assert all(error < 2e-3 if key == "loss" else error < 1e-4 for key, error in off.items()), off
    assert (whole.rewards.calls, resumed.rewards.calls) == (2, 1)


@pytest.mark.parametrize(
    ("before", "told"),
    [
        ({"num_iterations": 2}, "checkpoint-1 are of a run with other batches or devices; new ones are generated"),
        ({}, "adaptive_batching_completions_0.pt cannot be read"),
    ],
    ids=["of other batches", "damaged"],
)
def test_completions_that_are_of_no_use_are_generated_anew_as_trl_does(
    before: dict[str, Any], told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ended = []
    for name, ours in {"stock": None, "ours": AUTO}.items():
        trained(tmp_path / name, ours, "dapo", **{"num_iterations": 1, **SAVING, "max_steps": 1, **before})
        checkpoint = tmp_path / name / "out" / "checkpoint-1"
        if ours is not None and not before:
            (checkpoint / "adaptive_batching_completions_0.pt").write_bytes(b"PK cut off")
        trainer = made(tmp_path / name, ours, "dapo", num_iterations=1, **SAVING)
        trainer.train(resume_from_checkpoint=str(checkpoint))
        assert trainer.state.global_step == 3
        ended.append(trainer)
    assert_as(*ended)
    assert told in caplog.text


def test_where_it_is_only_if_possible_what_does_not_fit_before_training_trains_as_trl_does(
    stock: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = adopt(made(tmp_path, None, "dapo"), "auto", only_if_possible=True)
    with failing(trainer.adaptive.rows, "_method", range(99)):
        trainer.train()
    assert "GRPOTrainer trains without adaptive batching: out of memory" in caplog.text
    assert trainer.adaptive is None and not (tmp_path / "out" / "adaptive_batching").exists()
    assert_as(stock("dapo"), trainer)


def test_prompts_with_images_are_refused_before_anything_is_generated(tmp_path: Path) -> None:
    trainer = made(tmp_path, THREE, "dapo")
    trainer.train_dataset = trainer.train_dataset.map(lambda row: {**row, "image": "a picture"})
    with pytest.raises(ConfigError, match=r"prompts of GRPOTrainer have images.*text alone"):
        trainer.train()
    assert trainer.rewards.calls == 0


def test_older_versions_are_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(GRPOTrainer, "_tokenize_prompts")
    with pytest.raises(ConfigError, match=r"update to TRL 1\.16 and transformers 5\.19"):
        made(tmp_path, AUTO, "dapo")
