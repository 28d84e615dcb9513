"""Full fine-tuning by direct preference optimization on several devices: torchtune's recipe, with adaptive batching.

To launch from a checkout:
    PYTHONPATH=. tune run --nproc_per_node 2 recipes/full_dpo_distributed.py --config <config> ...

To launch from an installed package, in any directory:
    tune run --nproc_per_node 2 adaptive_batching/recipes/full_dpo_distributed.py --config <config> ...
"""

import sys

from adaptive_batching.torchtune import entry_point, recipe

FullDPORecipeDistributed = recipe("full_dpo_distributed")
recipe_main = entry_point(FullDPORecipeDistributed)

if __name__ == "__main__":
    sys.exit(recipe_main())
