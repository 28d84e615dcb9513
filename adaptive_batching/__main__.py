"""``python -m adaptive_batching``: the command line."""

from adaptive_batching._cli.main import main

if __name__ == "__main__":
    main()
