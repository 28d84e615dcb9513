"""Run a batch as micro-batches, each with one forward and backward."""
