"""Full fine-tuning by proximal policy optimization on one device: torchtune's recipe, with adaptive batching."""

from adaptive_batching.torchtune import entry_point, recipe

PPOFullFinetuneRecipeSingleDevice = recipe("ppo_full_finetune_single_device")
recipe_main = entry_point(PPOFullFinetuneRecipeSingleDevice)

if __name__ == "__main__":
    recipe_main()
