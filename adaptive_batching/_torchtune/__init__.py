"""The recipes, on top of the core. The only room that imports torchtune; what lists files reads its registry alone."""

import logging
import warnings

# What a user can do nothing about: torchao says it of every torch that it was not built with, and recipes need none of
# what it skips.
logging.getLogger("torchao").addFilter(lambda record: "Skipping import of cpp extensions" not in record.getMessage())
# torchdata's data loader, of torch
warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
# torch, of torchtune's norms, which take float32 and weights in bfloat16
warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
