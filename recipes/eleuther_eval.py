"""Evaluation on the tasks of EleutherAI's harness: torchtune's recipe of the same name, with adaptive batching.

To launch from a checkout:
    PYTHONPATH=. tune run recipes/eleuther_eval.py --config <config> use_maximum_batch_size=True

To launch from an installed package, in any directory:
    tune run adaptive_batching/recipes/eleuther_eval.py --config <config> use_maximum_batch_size=True
"""

import sys

from adaptive_batching.torchtune import (
    AdaptiveEvaluation,
    BatchesThatFit,
    entry_point,
    load_stock_evaluation,
    run_evaluation,
)

stock = load_stock_evaluation()


class _LLMEvalWrapper(BatchesThatFit, stock._LLMEvalWrapper):  # type: ignore[name-defined]
    """Stock's wrapper of a model for the harness."""


class EleutherEvalRecipe(AdaptiveEvaluation, stock.EleutherEvalRecipe):  # type: ignore[name-defined]
    """Stock's evaluation."""

    stock = stock
    wrapper = _LLMEvalWrapper


recipe_main = entry_point(EleutherEvalRecipe, run=run_evaluation)

if __name__ == "__main__":
    sys.exit(recipe_main())
