"""Run what the first screen shows, as printed, with the package that is installed, from an empty folder.

The README is that of the installed package's own metadata, so nothing of a checkout is read.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import metadata
from pathlib import Path


def main() -> None:
    """Run each block of Python that is a whole program, or a whole function."""
    import adaptive_batching

    assert "site-packages" in adaptive_batching.__file__, f"{adaptive_batching.__file__} is not an installed package"
    readme = str(metadata("adaptive-batching").json["description"])
    blocks = re.findall(r"^```python\n(.*?)^```$", readme, flags=re.DOTALL | re.MULTILINE)
    whole = [block for block in blocks if "GRPOTrainer" not in block]  # of which there are two lines
    assert len(whole) >= 3, "the description of the package has no programs"
    for number, block in enumerate(whole, 1):
        print(f"--- block {number} of {len(whole)} ---", flush=True)
        Path("block.py").write_text(block)
        exec(compile(block, "block.py", "exec", dont_inherit=True), {"__name__": "__main__"})
    print(f"all {len(whole)} ran, with Python {sys.version.split()[0]}")


if __name__ == "__main__":
    main()
