"""Adaptive batching for torchtune's recipes. The only part of the package that imports torchtune."""

from adaptive_batching.torchtune.async_checkpoints import ThroughClient
from adaptive_batching.torchtune.checkpoints import BatchStateInCheckpoint
from adaptive_batching.torchtune.evaluating import AdaptiveEvaluation, BatchesThatFit
from adaptive_batching.torchtune.host import distillation, fake_quantized, preferences
from adaptive_batching.torchtune.launch import entry_point, run_evaluation, run_recipe
from adaptive_batching.torchtune.many_devices import ManyDevices, start_process_group
from adaptive_batching.torchtune.ppo.recipe import AdaptivePPO
from adaptive_batching.torchtune.ppo.settings import check_settings as check_ppo_settings
from adaptive_batching.torchtune.quantization_aware import accept_configs_of_torchao
from adaptive_batching.torchtune.recipe import AdaptiveBatching
from adaptive_batching.torchtune.stock import load_stock, load_stock_evaluation

__all__ = [
    "AdaptiveBatching",
    "AdaptiveEvaluation",
    "AdaptivePPO",
    "BatchStateInCheckpoint",
    "BatchesThatFit",
    "ManyDevices",
    "ThroughClient",
    "accept_configs_of_torchao",
    "check_ppo_settings",
    "distillation",
    "entry_point",
    "fake_quantized",
    "load_stock",
    "load_stock_evaluation",
    "preferences",
    "run_evaluation",
    "run_recipe",
    "start_process_group",
]
