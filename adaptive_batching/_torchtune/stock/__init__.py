"""Torchtune's recipes as the rest of this package sees them: all that reads or changes their private state."""
