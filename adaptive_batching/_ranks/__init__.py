"""Agreement among the ranks of a run, and the collectives of a sharded model."""
