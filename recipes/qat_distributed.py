"""Quantization-aware full fine-tuning on several devices: torchtune's recipe, with adaptive batching."""

from adaptive_batching.torchtune import entry_point, recipe

QATRecipeDistributed = recipe("qat_distributed")
recipe_main = entry_point(QATRecipeDistributed)

if __name__ == "__main__":
    recipe_main()
