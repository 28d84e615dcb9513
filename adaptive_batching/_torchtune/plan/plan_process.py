"""Imported once, by the process that those of :mod:`~adaptive_batching._torchtune.plan.planning` are forked from."""

import logging
import warnings

import torch

logging.disable(logging.WARNING)  # before the import: torchao has a warning to give, as it gave to the command
warnings.simplefilter("ignore")
torch.set_num_threads(1)

import adaptive_batching._torchtune.plan.planning  # noqa: E402, F401
