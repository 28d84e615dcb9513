"""The recipes, on top of the core. The only room that imports torchtune; what lists files reads its registry alone."""

import logging

# torchao says this of every torch that it was not built with, and needs none of it for what recipes do.
logging.getLogger("torchao").addFilter(lambda record: "Skipping import of cpp extensions" not in record.getMessage())
