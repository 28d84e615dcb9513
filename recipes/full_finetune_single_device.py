"""Full fine-tuning on one device: torchtune's recipe of the same name, with adaptive batching.

To launch from a checkout:
    PYTHONPATH=. tune run recipes/full_finetune_single_device.py --config <config> use_maximum_batch_size=True

To launch from an installed package, in any directory:
    tune run adaptive_batching/recipes/full_finetune_single_device.py --config <config> use_maximum_batch_size=True
"""

import sys

from adaptive_batching.torchtune import entry_point, recipe

FullFinetuneRecipeSingleDevice = recipe("full_finetune_single_device")
recipe_main = entry_point(FullFinetuneRecipeSingleDevice)

if __name__ == "__main__":
    sys.exit(recipe_main())
