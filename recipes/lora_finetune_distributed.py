"""LoRA, QLoRA and DoRA fine-tuning on several devices: torchtune's recipe of the same name, with adaptive batching.

To launch from a checkout:
    PYTHONPATH=. tune run --nproc_per_node 2 recipes/lora_finetune_distributed.py --config <config> ...

To launch from an installed package, in any directory:
    tune run --nproc_per_node 2 adaptive_batching/recipes/lora_finetune_distributed.py --config <config> ...
"""

import sys

from omegaconf import DictConfig
from torch.distributed import init_process_group
from torchtune import config, training

from adaptive_batching.torchtune import AdaptiveBatching, ManyDevices, load_stock, run_recipe

stock = load_stock("lora_finetune_distributed")


class LoRAFinetuneRecipeDistributed(AdaptiveBatching, ManyDevices, stock.LoRAFinetuneRecipeDistributed):  # type: ignore[name-defined]
    """Stock's LoRA fine-tuning."""


@config.parse
def recipe_main(cfg: DictConfig) -> None:
    if training.is_distributed():
        offloads = cfg.get("fsdp_cpu_offload", False)
        if offloads:
            training.set_torch_num_threads()  # as stock does: the optimizer runs on the host
        # Stock asks for NCCL whatever the device.
        gathers_on_host = cfg.device != "cpu"
        init_process_group(training.get_distributed_backend(cfg.device, offload_ops_to_cpu=gathers_on_host))
    run_recipe(LoRAFinetuneRecipeDistributed, cfg)


if __name__ == "__main__":
    sys.exit(recipe_main())
