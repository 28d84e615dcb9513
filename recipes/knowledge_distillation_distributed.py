"""Knowledge distillation with LoRA on several devices: torchtune's recipe of the same name, with adaptive batching.

To launch from a checkout:
    PYTHONPATH=. tune run --nproc_per_node 2 recipes/knowledge_distillation_distributed.py --config <config> ...

To launch from an installed package, in any directory:
    tune run --nproc_per_node 2 adaptive_batching/recipes/knowledge_distillation_distributed.py --config <config> ...
"""

import sys

from adaptive_batching.torchtune import entry_point, recipe

KDRecipeDistributed = recipe("knowledge_distillation_distributed")
recipe_main = entry_point(KDRecipeDistributed)

if __name__ == "__main__":
    sys.exit(recipe_main())
