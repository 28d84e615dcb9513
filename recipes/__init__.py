"""Recipes for torchtune. A package, so that ``PYTHONPATH=. tune run recipes/...`` finds it before torchtune's.

From a checkout:
    PYTHONPATH=. tune run [--nproc_per_node 2] recipes/<name>.py --config <config> [key=value ...]

From an installed package, in any directory:
    tune run [--nproc_per_node 2] adaptive_batching/recipes/<name>.py --config <config> [key=value ...]
"""
