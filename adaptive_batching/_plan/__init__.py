"""Memory that a run would take, worked out without a GPU: decisions and arithmetic, without torch."""
