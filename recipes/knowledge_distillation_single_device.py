"""Knowledge distillation with LoRA on one device: torchtune's recipe of the same name, with adaptive batching."""

from adaptive_batching.torchtune import entry_point, recipe

KDRecipeSingleDevice = recipe("knowledge_distillation_single_device")
recipe_main = entry_point(KDRecipeSingleDevice)

if __name__ == "__main__":
    recipe_main()
