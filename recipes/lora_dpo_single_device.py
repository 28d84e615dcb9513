"""LoRA fine-tuning by direct preference optimization on one device: torchtune's recipe, with adaptive batching."""

from adaptive_batching.torchtune import entry_point, recipe

LoRADPORecipeSingleDevice = recipe("lora_dpo_single_device")
recipe_main = entry_point(LoRADPORecipeSingleDevice)

if __name__ == "__main__":
    recipe_main()
