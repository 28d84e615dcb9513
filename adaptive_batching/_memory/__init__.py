"""Memory: how much there is and is taken, limits, the test of an error for running out of it, and what frees it."""
