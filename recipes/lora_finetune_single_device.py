"""LoRA, QLoRA and DoRA fine-tuning on one device: torchtune's recipe of the same name, with adaptive batching.

To launch from a checkout:
    PYTHONPATH=. tune run recipes/lora_finetune_single_device.py --config <config> use_maximum_batch_size=True

To launch from an installed package, in any directory:
    tune run adaptive_batching/recipes/lora_finetune_single_device.py --config <config> use_maximum_batch_size=True
"""

import sys

from omegaconf import DictConfig
from torchtune import config

from adaptive_batching.torchtune import AdaptiveBatching, load_stock, run_recipe

stock = load_stock("lora_finetune_single_device")


class LoRAFinetuneRecipeSingleDevice(AdaptiveBatching, stock.LoRAFinetuneRecipeSingleDevice):  # type: ignore[name-defined]
    """Stock's LoRA fine-tuning."""


@config.parse
def recipe_main(cfg: DictConfig) -> None:
    run_recipe(LoRAFinetuneRecipeSingleDevice, cfg)


if __name__ == "__main__":
    sys.exit(recipe_main())
