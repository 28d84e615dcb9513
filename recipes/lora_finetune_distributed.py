"""LoRA, QLoRA and DoRA fine-tuning on several devices: torchtune's recipe of the same name, with adaptive batching.

To launch from a checkout:
    PYTHONPATH=. tune run --nproc_per_node 2 recipes/lora_finetune_distributed.py --config <config> ...

To launch from an installed package, in any directory:
    tune run --nproc_per_node 2 adaptive_batching/recipes/lora_finetune_distributed.py --config <config> ...
"""

import sys

from adaptive_batching.torchtune import entry_point, recipe

LoRAFinetuneRecipeDistributed = recipe("lora_finetune_distributed")
recipe_main = entry_point(LoRAFinetuneRecipeDistributed)

if __name__ == "__main__":
    sys.exit(recipe_main())
