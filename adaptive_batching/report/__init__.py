"""Record of a run."""
