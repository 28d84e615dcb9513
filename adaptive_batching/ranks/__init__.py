"""What the ranks of a run agree on, and the collectives of a sharded model."""
