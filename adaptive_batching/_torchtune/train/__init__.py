"""Training by a recipe: its settings, what is found before it begins, its loop and the steps of it."""
