"""Quantization-aware fine-tuning with LoRA on several devices: torchtune's recipe, with adaptive batching.

To launch from a checkout:
    PYTHONPATH=. tune run --nproc_per_node 2 recipes/qat_lora_finetune_distributed.py --config <config> ...

To launch from an installed package, in any directory:
    tune run --nproc_per_node 2 adaptive_batching/recipes/qat_lora_finetune_distributed.py --config <config> ...
"""

import sys
from typing import Any

from adaptive_batching.torchtune import (
    AdaptiveBatching,
    BatchStateInCheckpoint,
    ManyDevices,
    accept_configs_of_torchao,
    entry_point,
    load_stock,
    start_process_group,
)

stock = load_stock("qat_lora_finetune_distributed")


class QATLoRAFinetuneRecipeDistributed(
    AdaptiveBatching,
    ManyDevices,
    BatchStateInCheckpoint,
    stock.QATLoRAFinetuneRecipeDistributed,  # type: ignore[name-defined]
):
    """Stock's quantization-aware fine-tuning with LoRA."""

    def _setup_model(self, *args: Any, **kwargs: Any) -> Any:
        accept_configs_of_torchao()
        return super()._setup_model(*args, **kwargs)


recipe_main = entry_point(QATLoRAFinetuneRecipeDistributed, before=start_process_group)

if __name__ == "__main__":
    sys.exit(recipe_main())
