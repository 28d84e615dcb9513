"""LoRA, QLoRA and DoRA fine-tuning on one device: torchtune's recipe of the same name, with adaptive batching.

To launch from a checkout:
    PYTHONPATH=. tune run recipes/lora_finetune_single_device.py --config <config> use_maximum_batch_size=True

To launch from an installed package, in any directory:
    tune run adaptive_batching/recipes/lora_finetune_single_device.py --config <config> use_maximum_batch_size=True
"""

import sys

import torch
from omegaconf import DictConfig
from torchtune import config

from adaptive_batching.torchtune import AdaptiveBatching, load_stock, run_recipe

stock = load_stock("lora_finetune_single_device")


class LoRAFinetuneRecipeSingleDevice(AdaptiveBatching, stock.LoRAFinetuneRecipeSingleDevice):  # type: ignore[name-defined]
    """Stock's LoRA fine-tuning; the loss is stock's ``_loss_step``."""

    def save_checkpoint(self, epoch: int) -> None:
        # Stock merges the adapters into ``tensor.cpu()``, which on the cpu is the model that is being trained: the
        # next epoch would start from merged weights with the adapters on top, and a resumed run would not.
        on_cpu = self.settings.enabled and self._device.type == "cpu" and not self._save_adapter_weights_only
        base = [p for p in self._model.parameters() if not p.requires_grad and type(p.data) is torch.Tensor]
        saved = [p.detach().clone() for p in base] if on_cpu else []
        super().save_checkpoint(epoch=epoch)
        with torch.no_grad():
            for parameter, before in zip(base, saved, strict=False):
                parameter.copy_(before)


@config.parse
def recipe_main(cfg: DictConfig) -> None:
    run_recipe(LoRAFinetuneRecipeSingleDevice, cfg)


if __name__ == "__main__":
    sys.exit(recipe_main())
