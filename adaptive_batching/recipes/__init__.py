"""Stands for the folder ``recipes`` of a checkout, so that ``tune run adaptive_batching/recipes/...`` works there.

A wheel has the recipes themselves in this place.
"""

from pathlib import Path

__path__ = [str(Path(__file__).parents[2] / "recipes")]
