"""Evaluation on the tasks of EleutherAI's harness: torchtune's recipe of the same name, with adaptive batching."""

from adaptive_batching.torchtune import entry_point, recipe

EleutherEvalRecipe = recipe("eleuther_eval")
recipe_main = entry_point(EleutherEvalRecipe)

if __name__ == "__main__":
    recipe_main()
