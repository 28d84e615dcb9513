"""How a recipe is put together."""

from __future__ import annotations

from typing import Any

import pytest

from adaptive_batching import ConfigError
from adaptive_batching.torchtune import AdaptiveBatching, AdaptivePPO, load_stock, recipe
from recipes.full_finetune_single_device import FullFinetuneRecipeSingleDevice

stock = load_stock("full_finetune_single_device")


def as_it_is(parts: Any) -> Any:
    return parts


@pytest.mark.parametrize(
    ("name", "bases", "message"),
    [
        ("Wrong", (stock.FullFinetuneRecipeSingleDevice, AdaptiveBatching),
         "class Wrong: FullFinetuneRecipeSingleDevice comes before AdaptiveBatching"),
        ("Own", (FullFinetuneRecipeSingleDevice,),
         "class Own: _loss_step of Own would not be called; .*make_objective"),
    ],
)  # fmt: skip
def test_a_class_whose_code_would_not_run_is_refused_when_it_is_made(
    name: str, bases: tuple[type, ...], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        type(name, bases, {"_loss_step": as_it_is} if name == "Own" else {})


def test_our_recipes_can_be_subclassed_and_mixed_with_others() -> None:
    class Noisy:
        def setup(self, cfg: Any) -> None:
            super().setup(cfg)  # type: ignore[misc]

    class Ours(Noisy, FullFinetuneRecipeSingleDevice):
        def train(self) -> None:
            super().train()

    assert Ours.__mro__[:4] == (Ours, Noisy, FullFinetuneRecipeSingleDevice, AdaptiveBatching)


def test_a_recipe_by_name_is_stocks_with_another_objective_if_there_is_one() -> None:
    made = recipe("full_finetune_single_device", as_it_is)
    assert issubclass(made, stock.FullFinetuneRecipeSingleDevice) and made.make_objective("parts") == "parts"
    assert issubclass(recipe("ppo_full_finetune_single_device"), AdaptivePPO)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("full_finetune_everywhere", "is not known here; take one of full_"),
        ("ppo_full_finetune_single_device", "takes no objective"),
    ],
)
def test_a_recipe_that_is_not_there_or_computes_nothing_of_the_kind_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"recipe '{name}' {message}"):
        recipe(name, as_it_is)
