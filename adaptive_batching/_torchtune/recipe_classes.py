"""Our class for each stock recipe: what is mixed into stock's, and what it computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from adaptive_batching._torchtune.ppo.ppo_recipe import AdaptivePPO
from adaptive_batching._torchtune.stock.checkpoints import BatchStateInCheckpoint, ThroughClient
from adaptive_batching._torchtune.stock.loading import load_stock
from adaptive_batching._torchtune.stock.losses import (
    AcceptsConfigsOfTorchao,
    distillation,
    fake_quantized,
    preferences,
)
from adaptive_batching._torchtune.stock.many_devices import ManyDevices, start_process_group
from adaptive_batching._torchtune.stock.objective import Objective, StockParts
from adaptive_batching._torchtune.train.recipe import AdaptiveBatching
from adaptive_batching._values import ConfigError

MakeObjective = Callable[[StockParts], Objective]


_SHARDED = (AdaptiveBatching, ManyDevices)
_WITH_BATCH_STATE = (*_SHARDED, BatchStateInCheckpoint)
_OF_PREFERENCES = {"make_objective": preferences, "validates": False}
_IN_GROUP = {"prepare": start_process_group}
_RECIPES: dict[str, tuple[str, str, tuple[type, ...], dict[str, Any]]] = {
    "full_finetune_single_device": ("FullFinetuneRecipeSingleDevice", "full fine-tuning", (AdaptiveBatching,), {}),
    "full_finetune_distributed": ("FullFinetuneRecipeDistributed", "full fine-tuning", (*_SHARDED, ThroughClient), {}),
    "lora_finetune_single_device": ("LoRAFinetuneRecipeSingleDevice", "LoRA fine-tuning", (AdaptiveBatching,), {}),
    "lora_finetune_distributed": ("LoRAFinetuneRecipeDistributed", "LoRA fine-tuning", _SHARDED, _IN_GROUP),
    "lora_dpo_single_device": (
        "LoRADPORecipeSingleDevice", "LoRA fine-tuning by direct preference optimization",
        (AdaptiveBatching, BatchStateInCheckpoint), _OF_PREFERENCES,
    ),
    "lora_dpo_distributed": (
        "LoRADPORecipeDistributed", "LoRA fine-tuning by direct preference optimization",
        _WITH_BATCH_STATE, {**_OF_PREFERENCES, **_IN_GROUP},
    ),
    "full_dpo_distributed": (
        "FullDPORecipeDistributed", "full fine-tuning by direct preference optimization",
        _WITH_BATCH_STATE, {**_OF_PREFERENCES, **_IN_GROUP},
    ),
    "knowledge_distillation_single_device": (
        "KDRecipeSingleDevice", "knowledge distillation", (AdaptiveBatching,), {"make_objective": distillation},
    ),
    "knowledge_distillation_distributed": (
        "KDRecipeDistributed", "knowledge distillation",
        _WITH_BATCH_STATE, {"make_objective": distillation, **_IN_GROUP, "profiles_steps": False},
    ),
    "qat_distributed": (
        "QATRecipeDistributed", "quantization-aware full fine-tuning",
        _WITH_BATCH_STATE, {"make_objective": fake_quantized, **_IN_GROUP},
    ),
    "qat_lora_finetune_distributed": (
        "QATLoRAFinetuneRecipeDistributed", "quantization-aware fine-tuning with LoRA",
        (*_WITH_BATCH_STATE, AcceptsConfigsOfTorchao), _IN_GROUP,
    ),
    "ppo_full_finetune_single_device": (
        "PPOFullFinetuneRecipeSingleDevice", "fine-tuning by proximal policy optimization", (AdaptivePPO,), {},
    ),
}  # fmt: skip
"""Name of a recipe -> stock's class, its subject, classes before stock's among the bases, and other attributes."""


def recipe(name: str, objective: MakeObjective | None = None) -> Any:
    """Return torchtune's recipe of that name with adaptive batching: a class, to launch or to subclass.

    The class has the name of stock's. What this recipe needs, such as a process group, is taken care of.

    Args:
        name: Name of the stock recipe, such as ``"lora_finetune_single_device"``.
        objective: Makes the objective from the parts of the recipe, as ``make_objective``; None to compute as stock.

    Raises:
        ConfigError: If there is no such recipe, or it takes no objective.
    """
    if name not in _RECIPES:
        raise ConfigError(f"recipe {name!r} is not known here; take one of {', '.join(_RECIPES)}")
    stock_class, about, mixins, attributes = _RECIPES[name]
    if objective is not None and not mixin_of(name).takes_objective:
        raise ConfigError(f"recipe {name!r} takes no objective, as it has no loss to replace; leave objective=None")
    attributes = {"__doc__": f"Stock's {about}.", "__module__": __name__, **attributes}
    if objective is not None:
        attributes["make_objective"] = objective
    attributes |= {key: staticmethod(value) for key, value in attributes.items() if callable(value)}
    return type(stock_class, (*mixins, getattr(load_stock(name), stock_class)), attributes)


def mixin_of(name: str) -> type[AdaptiveBatching]:
    """Return the class that is mixed into the stock recipe of that name, without importing that."""
    _, _, mixins, _ = _RECIPES[name]
    return next(mixin for mixin in mixins if issubclass(mixin, AdaptiveBatching))
