"""With none of our settings, training is Trainer's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from adaptive_batching.transformers import AdaptiveArguments, adaptive
from tests.transformers.trainers import assert_same, make_data, make_trainer, trained


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_accumulation_steps": 3, "max_steps": 5},
        {"num_train_epochs": 1.5, "dataloader_drop_last": True, "label_smoothing_factor": 0.1},
        {"eval_strategy": "steps", "eval_steps": 3, "neftune_noise_alpha": 5.0},
    ],
    ids=str,
)
def test_with_none_set_training_is_trainers_own_bit_for_bit(settings: dict[str, Any], tmp_path: Path) -> None:
    if "eval_steps" in settings:
        settings = {**settings, "eval_dataset": make_data(9)}
    stock = trained(tmp_path / "stock", **settings)
    ours = make_trainer(tmp_path / "ours", AdaptiveArguments(), **settings)
    assert isinstance(ours, transformers.Trainer)
    assert ours.adaptive is None
    ours.train()
    assert_same(ours, stock)
    assert [*(tmp_path / "ours").rglob("*")] == [*(tmp_path / "stock").rglob("*")] == [], "nothing is written"


def test_what_is_no_trainer_is_refused_and_what_is_ours_already_stays_as_it_is() -> None:
    made = adaptive(transformers.Trainer)
    assert made is not transformers.Trainer and issubclass(made, transformers.Trainer)
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(made, name) == getattr(transformers.Trainer, name)
    assert adaptive(made) is made is adaptive(transformers.Trainer)
    with pytest.raises(TypeError, match="a class that inherits"):
        adaptive(dict)
