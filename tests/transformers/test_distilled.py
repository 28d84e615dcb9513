"""TRL's distillation in parts: the updates and logs of TRL's own, packed or padded, whatever runs out of memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trl import DistillationTrainer

from adaptive_batching import DoesNotFitError
from adaptive_batching._transformers.distilled import distils
from adaptive_batching.transformers import adopt
from tests.support.wide import few, wide
from tests.transformers.generating import (
    BATCH,
    difference,
    failing,
    logs_off,
    make_distilling,
    trained_once,
    weights,
)

AUTO = "auto"
KINDS: dict[str, dict[str, Any]] = {
    "jsd": {"beta": 0.5},
    "forward": {"beta": 0.0, "temperature": 0.7},
    "reverse": {"beta": 1.0, "max_grad_norm": 0.05},
    "learned positions": {"model": "gpt2", "teacher": "gpt2"},
    "wider teacher": {"teacher": "gpt2"},
    "lora": {"lora": True},
    "checkpointed": {"gradient_checkpointing": True},
}


def trained(folder: Path, ours: Any, name: str) -> Any:
    trainer = make_distilling(folder, ours, **KINDS[name])
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that returns a stock trainer of a kind once it has trained."""
    return trained_once(lambda name: trained(tmp_path_factory.mktemp("stock"), None, name))


def assert_as(stock: Any, ours: Any) -> None:
    assert difference(weights(stock), weights(ours)) < 2e-5  # Adam's first steps go by the sign of what nearly cancels
    assert max(logs_off(stock.seen_logs, ours.seen_logs).values()) < 1e-4


@pytest.mark.parametrize("name", few(KINDS, "jsd"))
def test_updates_and_logs_are_those_of_trl(name: str, stock: Any, tmp_path: Path) -> None:
    for number, ours in enumerate((AUTO, {"micro_batch_size": 3})):
        trainer = trained(tmp_path / str(number), ours, name)
        assert trainer.adaptive.rows.packed is (ours == AUTO)
        assert_as(stock(name), trainer)


def test_with_nothing_set_training_is_that_of_trl(stock: Any, tmp_path: Path) -> None:
    ours = trained(tmp_path, {}, "jsd")
    assert ours.adaptive is None and torch.equal(weights(stock("jsd")), weights(ours))


def test_a_row_is_packed_without_padding(tmp_path: Path) -> None:
    trainer = make_distilling(tmp_path, AUTO)
    shapes: list[tuple[int, int]] = []
    trainer.model.model.layers[0].register_forward_pre_hook(
        lambda module, args: shapes.append(tuple(args[0].shape[:2])) if torch.is_grad_enabled() else None
    )
    trainer.train()
    masks = [torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1) for batch in trainer._buffered_inputs]
    assert shapes[-2:] == [(1, int(mask.sum())) for mask in masks]


@pytest.mark.parametrize("ours", [AUTO, wide({"recover_from_oom": True})], ids=["auto", "recovery"])
@pytest.mark.parametrize("of", ["teacher_model", "model"])
def test_memory_that_runs_out_in_either_model_ends_in_the_same_updates(
    of: str, ours: Any, stock: Any, tmp_path: Path
) -> None:
    trainer = make_distilling(tmp_path, ours, **KINDS["jsd"])
    ran: list[int] = []

    def hook(module: Any, args: Any, *_: Any) -> None:
        if trainer._buffered_inputs is not None and (of == "teacher_model" or torch.is_grad_enabled()):
            ran.append(len(ran))
            if ran[-1] in (1, 4):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

    getattr(trainer, of).model.layers[1].register_forward_hook(hook)
    trainer.train()
    assert len(ran) > 4 and trainer.adaptive.num_recoveries == 2
    assert_as(stock("jsd"), trainer)


def test_memory_that_runs_out_while_generating_takes_fewer_prompts_and_loses_none(tmp_path: Path) -> None:
    trainer = make_distilling(tmp_path, AUTO)
    with failing(trainer.model, "generate", [0, 1]) as failed:
        trainer.train()
    assert failed == [0, 1] and trainer.adaptive.num_recoveries == 2 and trainer.state.global_step == 2
    assert sum(len(batch["completion_ids"]) for batch in trainer._buffered_inputs) == 2 * BATCH


def test_an_evaluation_that_runs_out_of_memory_has_the_loss_of_trl(tmp_path: Path) -> None:
    logs = []
    for name, ours in {"stock": None, "ours": {"recover_from_oom": True}}.items():
        trainer = make_distilling(tmp_path / name, ours, per_device_eval_batch_size=BATCH)
        torch.manual_seed(5)
        if ours is None:
            logs.append(trainer.evaluate(trainer.train_dataset.select(range(12))))
            continue
        with failing(trainer.adaptive.rows, "_method", [1, 5]) as failed:
            logs.append(trainer.evaluate(trainer.train_dataset.select(range(12))))
        assert failed == [1, 5] and trainer.adaptive.num_recoveries == 2
    assert {"eval_loss", "eval_entropy"} <= logs[0].keys()
    assert max(logs_off(*([each] for each in logs)).values()) < 1e-4


def test_what_does_not_fit_at_all_says_what_to_set(tmp_path: Path) -> None:
    trainer = make_distilling(tmp_path, {"recover_from_oom": True})
    with (
        failing(trainer.adaptive.rows, "_method", range(2, 99)),
        pytest.raises(DoesNotFitError, match=r"1 completion of up to .* tokens.*max_completion_length"),
    ):
        trainer.train()


def test_a_trainer_that_is_there_becomes_adaptive(stock: Any, tmp_path: Path) -> None:
    trainer = adopt(make_distilling(tmp_path, None, **KINDS["jsd"]))
    trainer.train()
    assert "packed" in str(trainer.adaptive)
    assert_as(stock("jsd"), trainer)


def test_a_class_that_computes_its_loss_otherwise_is_not_taken_for_one() -> None:
    class Other(DistillationTrainer):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    assert distils(DistillationTrainer) and not distils(Other)
