"""Quantization-aware full fine-tuning on several devices: torchtune's recipe, with adaptive batching.

To launch from a checkout:
    PYTHONPATH=. tune run --nproc_per_node 2 recipes/qat_distributed.py --config <config> ...

To launch from an installed package, in any directory:
    tune run --nproc_per_node 2 adaptive_batching/recipes/qat_distributed.py --config <config> ...
"""

import sys

from adaptive_batching.torchtune import (
    AdaptiveBatching,
    BatchStateInCheckpoint,
    ManyDevices,
    entry_point,
    fake_quantized,
    load_stock,
    start_process_group,
)

stock = load_stock("qat_distributed")


class QATRecipeDistributed(AdaptiveBatching, ManyDevices, BatchStateInCheckpoint, stock.QATRecipeDistributed):  # type: ignore[name-defined]
    """Stock's quantization-aware full fine-tuning."""

    make_objective = staticmethod(fake_quantized)


recipe_main = entry_point(QATRecipeDistributed, before=start_process_group)

if __name__ == "__main__":
    sys.exit(recipe_main())
