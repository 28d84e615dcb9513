"""Knowledge distillation with LoRA on several devices: torchtune's recipe of the same name, with adaptive batching.

To launch from a checkout:
    PYTHONPATH=. tune run --nproc_per_node 2 recipes/knowledge_distillation_distributed.py --config <config> ...

To launch from an installed package, in any directory:
    tune run --nproc_per_node 2 adaptive_batching/recipes/knowledge_distillation_distributed.py --config <config> ...
"""

import sys

from adaptive_batching.torchtune import (
    AdaptiveBatching,
    BatchStateInCheckpoint,
    ManyDevices,
    distillation,
    entry_point,
    load_stock,
    start_process_group,
)

stock = load_stock("knowledge_distillation_distributed")


class KDRecipeDistributed(AdaptiveBatching, ManyDevices, BatchStateInCheckpoint, stock.KDRecipeDistributed):  # type: ignore[name-defined]
    """Stock's knowledge distillation."""

    make_objective = staticmethod(distillation)
    profiles_steps = False


recipe_main = entry_point(KDRecipeDistributed, before=start_process_group)

if __name__ == "__main__":
    sys.exit(recipe_main())
