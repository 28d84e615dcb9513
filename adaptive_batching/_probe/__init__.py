"""Find the largest batch that fits before training starts."""
