"""Environments of the processes that tests start."""

# glibc keeps and scatters freed memory; so told, it gives it back, and the limit is repeatable to one sample.
TAME_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}

OF_THE_RECIPES = ("datasets", "matplotlib", "numpy", "omegaconf", "torchao", "torchdata", "torchtune", "tqdm")
"""Packages that recipes, their data and pictures take, and a plain loop does without."""
