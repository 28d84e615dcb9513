"""How a batch runs: cut into micro-batches, each one forward and backward."""
