"""Environments of the processes that tests start."""

import ctypes
import importlib

# glibc keeps and scatters freed memory; so told, it gives it back, and the limit is repeatable to one sample.
TAME_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


def tame_malloc() -> None:
    """Have this process, a fork, keep as little of what it frees as one that has been started so."""
    m_trim_threshold, m_mmap_threshold, m_arena_max = -1, -3, -8
    for parameter, value in ((m_mmap_threshold, 65536), (m_trim_threshold, 65536), (m_arena_max, 1)):
        ctypes.CDLL(None).mallopt(parameter, value)


def let_peft_pass_torchao() -> None:
    """Keep PEFT from refusing the torchao of torchtune, which is older than PEFT asks for and not used here."""
    importlib.import_module("peft.tuners.lora.torchao").is_torchao_available = lambda: False  # type: ignore[attr-defined]


OF_THE_RECIPES = ("datasets", "matplotlib", "numpy", "omegaconf", "torchao", "torchdata", "torchtune", "tqdm")
"""Packages that recipes, their data and pictures take, and a plain loop does without."""
