"""LoRA, QLoRA and DoRA fine-tuning on one device: torchtune's recipe of the same name, with adaptive batching.

To launch from a checkout:
    PYTHONPATH=. tune run recipes/lora_finetune_single_device.py --config <config> use_maximum_batch_size=True

To launch from an installed package, in any directory:
    tune run adaptive_batching/recipes/lora_finetune_single_device.py --config <config> use_maximum_batch_size=True
"""

import sys

from adaptive_batching.torchtune import AdaptiveBatching, entry_point, load_stock

stock = load_stock("lora_finetune_single_device")


class LoRAFinetuneRecipeSingleDevice(AdaptiveBatching, stock.LoRAFinetuneRecipeSingleDevice):  # type: ignore[name-defined]
    """Stock's LoRA fine-tuning."""


recipe_main = entry_point(LoRAFinetuneRecipeSingleDevice)

if __name__ == "__main__":
    sys.exit(recipe_main())
