"""Knowledge distillation with LoRA on several devices: torchtune's recipe of the same name, with adaptive batching."""

from adaptive_batching.torchtune import entry_point, recipe

KDRecipeDistributed = recipe("knowledge_distillation_distributed")
recipe_main = entry_point(KDRecipeDistributed)

if __name__ == "__main__":
    recipe_main()
