"""Run what the first screen shows, and the examples, with the package that is installed, from an empty folder.

    python first_screen.py [examples]

The README is that of the installed package's own metadata, and examples are run from a copy of their folder, so that
nothing else of a checkout is read. An example that needs what is not installed is left out, and named.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from importlib.metadata import metadata, version
from pathlib import Path

NEWER = {"two_ranks": ("torch", (2, 13)), "grpo": ("trl", (1, 16))}
"""Examples that need a newer version of a package than others do, as they say themselves."""


def main() -> None:
    """Run each block of Python that is a whole program, or a whole function, and each example."""
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
    for folder in sys.argv[1:]:
        for example in sorted(Path(folder).glob("*.py")):
            run_example(example)


def run_example(path: Path) -> None:
    """Run an example as its page says, unless something that it needs is not installed."""
    imported = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    needed = {str(node.module).split(".")[0] for node in imported}
    missing = sorted(name for name in needed if importlib.util.find_spec(name) is None)
    package, least = NEWER.get(path.stem, ("torch", (0, 0)))
    if not missing and tuple(map(int, version(package).split(".")[:2])) < least:
        missing.append(f"{package} {'.'.join(map(str, least))}")
    if missing:
        print(f"--- {path.name}: left out, without {', '.join(missing)} ---", flush=True)
        return
    print(f"--- {path.name} ---", flush=True)
    ranks = ["-m", "torch.distributed.run", "--nproc_per_node", "2"] if path.stem == "two_ranks" else []
    subprocess.run([sys.executable, *ranks, path], check=True)


if __name__ == "__main__":
    main()
