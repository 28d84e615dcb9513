"""Quantization-aware full fine-tuning on several devices: torchtune's recipe, with adaptive batching.

To launch from a checkout:
    PYTHONPATH=. tune run --nproc_per_node 2 recipes/qat_distributed.py --config <config> ...

To launch from an installed package, in any directory:
    tune run --nproc_per_node 2 adaptive_batching/recipes/qat_distributed.py --config <config> ...
"""

import sys

from adaptive_batching.torchtune import entry_point, recipe

QATRecipeDistributed = recipe("qat_distributed")
recipe_main = entry_point(QATRecipeDistributed)

if __name__ == "__main__":
    sys.exit(recipe_main())
