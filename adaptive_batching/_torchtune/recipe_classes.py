"""Our class for each stock recipe: what is mixed into stock's, and what it computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig

from adaptive_batching._torchtune.async_checkpoints import ThroughClient
from adaptive_batching._torchtune.checkpoints import BatchStateInCheckpoint
from adaptive_batching._torchtune.evaluating import AdaptiveEvaluation, BatchesThatFit
from adaptive_batching._torchtune.losses import (
    AcceptsConfigsOfTorchao,
    distillation,
    fake_quantized,
    next_token,
    preferences,
)
from adaptive_batching._torchtune.many_devices import ManyDevices, start_process_group
from adaptive_batching._torchtune.objective import Objective, StockParts
from adaptive_batching._torchtune.ppo.ppo_recipe import AdaptivePPO
from adaptive_batching._torchtune.recipe import AdaptiveBatching
from adaptive_batching._torchtune.settings import check_ppo_settings
from adaptive_batching._torchtune.stock import load_stock, load_stock_evaluation
from adaptive_batching._values import ConfigError

MakeObjective = Callable[[StockParts], Objective]


@dataclass(frozen=True)
class _Added:
    """What makes a stock recipe ours."""

    stock_class: str
    about: str
    """Subject of the recipe, for its help."""

    mixins: tuple[type, ...] = (AdaptiveBatching,)
    """Classes before stock's in the list of bases."""

    make_objective: MakeObjective = next_token
    prepare: Callable[[DictConfig], None] = AdaptiveBatching.prepare
    """Called with the config before the recipe is made."""

    attributes: Mapping[str, Any] = field(default_factory=dict)


_SHARDED = (AdaptiveBatching, ManyDevices)
_WITH_BATCH_STATE = (*_SHARDED, BatchStateInCheckpoint)
_RECIPES = {
    "full_finetune_single_device": _Added("FullFinetuneRecipeSingleDevice", "full fine-tuning"),
    "full_finetune_distributed": _Added(
        "FullFinetuneRecipeDistributed", "full fine-tuning", (*_SHARDED, ThroughClient)
    ),
    "lora_finetune_single_device": _Added("LoRAFinetuneRecipeSingleDevice", "LoRA fine-tuning"),
    "lora_finetune_distributed": _Added(
        "LoRAFinetuneRecipeDistributed", "LoRA fine-tuning", _SHARDED, prepare=start_process_group
    ),
    "lora_dpo_single_device": _Added(
        "LoRADPORecipeSingleDevice", "LoRA fine-tuning by direct preference optimization",
        (AdaptiveBatching, BatchStateInCheckpoint), preferences, attributes={"validates": False},
    ),
    "lora_dpo_distributed": _Added(
        "LoRADPORecipeDistributed", "LoRA fine-tuning by direct preference optimization",
        _WITH_BATCH_STATE, preferences, start_process_group, {"validates": False},
    ),
    "full_dpo_distributed": _Added(
        "FullDPORecipeDistributed", "full fine-tuning by direct preference optimization",
        _WITH_BATCH_STATE, preferences, start_process_group, {"validates": False, "logs_gradient_norm": False},
    ),
    "knowledge_distillation_single_device": _Added(
        "KDRecipeSingleDevice", "knowledge distillation", make_objective=distillation
    ),
    "knowledge_distillation_distributed": _Added(
        "KDRecipeDistributed", "knowledge distillation",
        _WITH_BATCH_STATE, distillation, start_process_group, {"profiles_steps": False},
    ),
    "qat_distributed": _Added(
        "QATRecipeDistributed", "quantization-aware full fine-tuning",
        _WITH_BATCH_STATE, fake_quantized, start_process_group,
    ),
    "qat_lora_finetune_distributed": _Added(
        "QATLoRAFinetuneRecipeDistributed", "quantization-aware fine-tuning with LoRA",
        (*_WITH_BATCH_STATE, AcceptsConfigsOfTorchao), prepare=start_process_group,
    ),
    "ppo_full_finetune_single_device": _Added(
        "PPOFullFinetuneRecipeSingleDevice", "fine-tuning by proximal policy optimization",
        (AdaptivePPO,), prepare=check_ppo_settings,
    ),
}  # fmt: skip
_EVALUATION = "eleuther_eval"
_COMPUTES_ITS_OWN = ("ppo_full_finetune_single_device", _EVALUATION)


def recipe(name: str, objective: MakeObjective | None = None) -> Any:
    """Return torchtune's recipe of that name with adaptive batching: a class, to launch or to subclass.

    The class has the name of stock's. What this recipe needs, such as a process group, is taken care of.

    Args:
        name: Name of the stock recipe, such as ``"lora_finetune_single_device"``.
        objective: Makes the objective from the parts of the recipe, as ``make_objective``; None to compute as stock.

    Raises:
        ConfigError: If there is no such recipe, or it takes no objective.
    """
    if name not in (*_RECIPES, _EVALUATION):
        raise ConfigError(f"recipe {name!r} is not known here; take one of {', '.join((*_RECIPES, _EVALUATION))}")
    if objective is not None and name in _COMPUTES_ITS_OWN:
        raise ConfigError(f"recipe {name!r} takes no objective, as it has no loss to replace; leave objective=None")
    if name == _EVALUATION:
        return _evaluation()
    added = _RECIPES[name]
    stock_class = getattr(load_stock(name), added.stock_class)
    attributes = {
        "__doc__": f"Stock's {added.about}.",
        "__module__": __name__,
        "make_objective": staticmethod(objective or added.make_objective),
        "prepare": staticmethod(added.prepare),
        **added.attributes,
    }
    return type(added.stock_class, (*added.mixins, stock_class), attributes)


def _evaluation() -> Any:
    stock = load_stock_evaluation()
    wrapper = type("_LLMEvalWrapper", (BatchesThatFit, stock._LLMEvalWrapper), {"__module__": __name__})
    attributes = {"__doc__": "Stock's evaluation.", "__module__": __name__, "stock": stock, "wrapper": wrapper}
    return type("EleutherEvalRecipe", (AdaptiveEvaluation, stock.EleutherEvalRecipe), attributes)
