"""The recipes, on top of the core. The only room that imports torchtune."""
