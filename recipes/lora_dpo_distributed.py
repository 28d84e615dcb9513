"""LoRA fine-tuning by direct preference optimization on several devices: torchtune's recipe, with adaptive batching.

To launch from a checkout:
    PYTHONPATH=. tune run --nproc_per_node 2 recipes/lora_dpo_distributed.py --config <config> ...

To launch from an installed package, in any directory:
    tune run --nproc_per_node 2 adaptive_batching/recipes/lora_dpo_distributed.py --config <config> ...
"""

import sys

from adaptive_batching.torchtune import (
    AdaptiveBatching,
    BatchStateInCheckpoint,
    ManyDevices,
    entry_point,
    load_stock,
    preferences,
    start_process_group,
)

stock = load_stock("lora_dpo_distributed")


class LoRADPORecipeDistributed(AdaptiveBatching, ManyDevices, BatchStateInCheckpoint, stock.LoRADPORecipeDistributed):  # type: ignore[name-defined]
    """Stock's LoRA fine-tuning by direct preference optimization."""

    make_objective = staticmethod(preferences)
    validates = False


recipe_main = entry_point(LoRADPORecipeDistributed, before=start_process_group)

if __name__ == "__main__":
    sys.exit(recipe_main())
