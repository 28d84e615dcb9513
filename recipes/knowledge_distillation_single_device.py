"""Knowledge distillation with LoRA on one device: torchtune's recipe of the same name, with adaptive batching.

To launch from a checkout:
    PYTHONPATH=. tune run recipes/knowledge_distillation_single_device.py --config <config> ...

To launch from an installed package, in any directory:
    tune run adaptive_batching/recipes/knowledge_distillation_single_device.py --config <config> ...
"""

import sys

from adaptive_batching.torchtune import entry_point, recipe

KDRecipeSingleDevice = recipe("knowledge_distillation_single_device")
recipe_main = entry_point(KDRecipeSingleDevice)

if __name__ == "__main__":
    sys.exit(recipe_main())
