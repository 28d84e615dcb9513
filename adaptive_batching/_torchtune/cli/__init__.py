"""The commands, and how a recipe is launched."""
