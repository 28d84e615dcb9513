"""Trainers that generate on two ranks with DDP: parts, and memory that runs out on one of them, change no update."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.transformers.generating import (
    failing,
    fails_in_backward,
    logs_off,
    make,
    make_distilling,
    make_model,
    save_student_and_teacher,
    weights,
)

pytestmark = [pytest.mark.wide, pytest.mark.xdist_group("generated_two_ranks")]

RANK = int(os.environ.get("RANK", 0))
DISTILLATION = "distillation"
LOSSES: dict[str, dict[str, Any]] = {
    "dapo": {"loss_type": "dapo"},
    DISTILLATION: {"beta": 0.5},
    "quantile": {"loss_type": "bnpo", "top_entropy_quantile": 0.5},  # of the tokens of both ranks
}
OURS: dict[str, Any] = {
    "stock": None,
    "auto": "auto",
    "3": {"micro_batch_size": 3},
    "short": {"recover_from_oom": True},
    "short in backward": {"recover_from_oom": True},
}


def run_all(folder: Path) -> dict[str, Any]:
    """Train in each way on this rank; memory runs out twice, in forwards of the second or backwards of the first."""
    found = {}
    generated_together: dict[str, Any] = {
        "steps_per_generation": 4,
        "max_steps": 3,
        "save_strategy": "steps",
        "save_steps": 1,
    }
    for name, checkpoint in {"whole": None, "resumed": folder / "whole" / "out" / "checkpoint-1"}.items():
        trainer = make(
            folder / name, "auto", saved=folder / "model", per_device_train_batch_size=4, num_iterations=1,
            **generated_together,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
        found[name] = {"weights": weights(trainer).tolist(), "calls": trainer.rewards.calls}
    for loss, settings in LOSSES.items():
        made_by = make_distilling if loss == DISTILLATION else make
        for name, ours in OURS.items():
            own = folder / f"{loss} {name} {RANK}"
            trainer = made_by(own, ours, saved=folder / "model", per_device_train_batch_size=4, **settings)
            if name == "short" and RANK == 1:
                with failing(trainer.adaptive.rows, "_method", [4, 9]) as failed:
                    trainer.train()
                assert failed == [4, 9]
            elif name == "short in backward" and RANK == 0:
                ran = fails_in_backward(trainer, [1, 4])
                trainer.train()
                assert len(ran) > 4
            else:
                trainer.train()
            recoveries = 0 if ours is None else trainer.adaptive.num_recoveries
            found[f"{loss} {name}"] = {
                "digest": hashlib.sha256(weights(trainer).numpy().tobytes()).hexdigest(),
                "weights": weights(trainer).tolist(), "logs": trainer.seen_logs, "recoveries": recoveries,
            }  # fmt: skip
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Mapping[str, Any]]:
    folder = tmp_path_factory.mktemp("generated_two_ranks")
    make_model().save_pretrained(folder / "model")
    save_student_and_teacher(folder / "model")
    return run_ranks(run_all, folder, folder=folder)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("ours", [name for name in OURS if name != "stock"])
def test_two_ranks_take_the_updates_of_trl_and_recover_together(
    loss: str, ours: str, ranks: Sequence[Mapping[str, Any]]
) -> None:
    (first, second), stock = (rank[f"{loss} {ours}"] for rank in ranks), ranks[0][f"{loss} stock"]
    assert first["digest"] == second["digest"], "both have the same weights"
    one, other = (torch.tensor(each["weights"], dtype=torch.float64) for each in (stock, first))
    assert float((one - other).norm() / one.norm()) < 2e-5
    off = logs_off(stock["logs"], first["logs"])
    assert all(error < 2e-3 if key == "loss" else error < 1e-4 for key, error in off.items()), off
    assert second["recoveries"] == (2 if ours.startswith("short") else 0)


def test_each_rank_goes_on_with_the_completions_of_a_checkpoint(ranks: Sequence[Mapping[str, Any]]) -> None:
    for rank in ranks:
        whole, resumed = (torch.tensor(rank[name]["weights"], dtype=torch.float64) for name in ("whole", "resumed"))
        assert float((whole - resumed).norm() / whole.norm()) < 1e-6
        assert (rank["whole"]["calls"], rank["resumed"]["calls"]) == (2, 1)
