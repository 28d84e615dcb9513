"""Full fine-tuning on several devices: torchtune's recipe of the same name, with adaptive batching."""

from adaptive_batching.torchtune import entry_point, recipe

FullFinetuneRecipeDistributed = recipe("full_finetune_distributed")
recipe_main = entry_point(FullFinetuneRecipeDistributed)

if __name__ == "__main__":
    recipe_main()
