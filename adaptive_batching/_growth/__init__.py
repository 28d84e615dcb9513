"""Growth of the batch while training: increase functions, who asks them, and the course of a run."""
