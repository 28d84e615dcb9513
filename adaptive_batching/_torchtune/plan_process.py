"""Imported once, by the process that those of :mod:`~adaptive_batching._torchtune.levers` are forked from.

What it says has been said by the command itself.
"""

import logging
import warnings

import torch

logging.disable(logging.WARNING)  # before the import: torchao has a warning to give
warnings.simplefilter("ignore")
torch.set_num_threads(1)

import adaptive_batching._torchtune.levers  # noqa: E402, F401
