"""Full fine-tuning on one device: torchtune's recipe of the same name, with adaptive batching."""

from adaptive_batching.torchtune import entry_point, recipe

FullFinetuneRecipeSingleDevice = recipe("full_finetune_single_device")
recipe_main = entry_point(FullFinetuneRecipeSingleDevice)

if __name__ == "__main__":
    recipe_main()
