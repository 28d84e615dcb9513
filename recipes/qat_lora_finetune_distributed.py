"""Quantization-aware fine-tuning with LoRA on several devices: torchtune's recipe, with adaptive batching."""

from adaptive_batching.torchtune import entry_point, recipe

QATLoRAFinetuneRecipeDistributed = recipe("qat_lora_finetune_distributed")
recipe_main = entry_point(QATLoRAFinetuneRecipeDistributed)

if __name__ == "__main__":
    recipe_main()
