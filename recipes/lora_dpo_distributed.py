"""LoRA fine-tuning by direct preference optimization on several devices: torchtune's recipe, with adaptive batching."""

from adaptive_batching.torchtune import entry_point, recipe

LoRADPORecipeDistributed = recipe("lora_dpo_distributed")
recipe_main = entry_point(LoRADPORecipeDistributed)

if __name__ == "__main__":
    recipe_main()
