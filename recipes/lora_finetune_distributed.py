"""LoRA, QLoRA and DoRA fine-tuning on several devices: torchtune's recipe of the same name, with adaptive batching.

To launch from a checkout:
    PYTHONPATH=. tune run --nproc_per_node 2 recipes/lora_finetune_distributed.py --config <config> ...

To launch from an installed package, in any directory:
    tune run --nproc_per_node 2 adaptive_batching/recipes/lora_finetune_distributed.py --config <config> ...
"""

import sys

from adaptive_batching.torchtune import AdaptiveBatching, ManyDevices, entry_point, load_stock, start_process_group

stock = load_stock("lora_finetune_distributed")


class LoRAFinetuneRecipeDistributed(AdaptiveBatching, ManyDevices, stock.LoRAFinetuneRecipeDistributed):  # type: ignore[name-defined]
    """Stock's LoRA fine-tuning."""


recipe_main = entry_point(LoRAFinetuneRecipeDistributed, before=start_process_group)

if __name__ == "__main__":
    sys.exit(recipe_main())
