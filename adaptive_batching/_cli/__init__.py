"""The command line: ``adaptive-batching`` or ``python -m adaptive_batching``.

Each command is a function that adds itself to the parser; see :data:`adaptive_batching._cli.main.COMMANDS`.
"""
