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
    logs_off,
    make,
    make_distilling,
    make_model,
    save_student_and_teacher,
    weights,
)

pytestmark = pytest.mark.xdist_group("generated_two_ranks")

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
}


def run_all(folder: Path) -> dict[str, Any]:
    """Train in each way on this rank; with ``short``, memory runs out twice on the second."""
    found = {}
    for loss, settings in LOSSES.items():
        made_by = make_distilling if loss == DISTILLATION else make
        for name, ours in OURS.items():
            own = folder / f"{loss} {name} {RANK}"
            trainer = made_by(own, ours, saved=folder / "model", per_device_train_batch_size=4, **settings)
            if name == "short" and RANK == 1:
                with failing(trainer.adaptive.rows, "_method", [4, 9]) as failed:
                    trainer.train()
                assert failed == [4, 9]
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
    assert (second["recoveries"] > 0) == (ours == "short")
