"""Recipes for ``tune run``. A package, so that ``PYTHONPATH=. tune run recipes/...`` finds it before torchtune's."""
