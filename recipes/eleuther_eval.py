"""Evaluation on the tasks of EleutherAI's harness: torchtune's recipe of the same name, with adaptive batching.

To launch from a checkout:
    PYTHONPATH=. tune run recipes/eleuther_eval.py --config <config> use_maximum_batch_size=True

To launch from an installed package, in any directory:
    tune run adaptive_batching/recipes/eleuther_eval.py --config <config> use_maximum_batch_size=True
"""

import sys

from adaptive_batching.torchtune import entry_point, recipe

EleutherEvalRecipe = recipe("eleuther_eval")
recipe_main = entry_point(EleutherEvalRecipe)

if __name__ == "__main__":
    sys.exit(recipe_main())
