"""One training step without its memory: what it takes, at any batch size, and what an allocator makes of it."""
