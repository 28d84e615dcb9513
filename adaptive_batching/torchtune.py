"""Adaptive batching for torchtune's recipes: what a recipe file is made of, and what a recipe of your own overrides."""

from adaptive_batching._report.events import StepCost, Watcher
from adaptive_batching._torchtune.cli.launch import entry_point, run_recipe
from adaptive_batching._torchtune.ppo.ppo_recipe import AdaptivePPO
from adaptive_batching._torchtune.ppo.ppo_settings import check_ppo_settings
from adaptive_batching._torchtune.recipe_classes import recipe
from adaptive_batching._torchtune.stock.checkpoints import BatchStateInCheckpoint, ThroughClient
from adaptive_batching._torchtune.stock.loading import load_stock, load_stock_evaluation
from adaptive_batching._torchtune.stock.losses import (
    NextToken,
    accept_configs_of_torchao,
    distillation,
    fake_quantized,
    preferences,
)
from adaptive_batching._torchtune.stock.many_devices import ManyDevices, start_process_group
from adaptive_batching._torchtune.stock.objective import Counts, Objective, Sums
from adaptive_batching._torchtune.train.evaluating import AdaptiveEvaluation, BatchesThatFit
from adaptive_batching._torchtune.train.recipe import AdaptiveBatching

__all__ = [
    "AdaptiveBatching", "AdaptiveEvaluation", "AdaptivePPO", "BatchStateInCheckpoint", "BatchesThatFit", "Counts",
    "ManyDevices", "NextToken", "Objective", "StepCost", "Sums", "ThroughClient", "Watcher",
    "accept_configs_of_torchao", "check_ppo_settings", "distillation", "entry_point", "fake_quantized", "load_stock",
    "load_stock_evaluation", "preferences", "recipe", "run_recipe", "start_process_group",
]  # fmt: skip
