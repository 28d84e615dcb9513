"""Growth of the batch while training: increase functions, who asks them, and the batch schedule of a run."""
