"""Make the page of a run in a process of its own, so that nothing about it can touch training."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
# An empty package stands for adaptive_batching, whose own __init__ loads torch: that takes seconds, and memory.
_CODE = """
import sys, types
package = types.ModuleType("adaptive_batching")
package.__path__ = [sys.argv[1]]
sys.modules["adaptive_batching"] = package
from pathlib import Path
from adaptive_batching._report.page import write_page
print(write_page([Path(sys.argv[2])]))
"""


def start_page(directory: Path) -> subprocess.Popen[str]:
    """Start a process that writes the page of the record in ``directory``, and prints its path."""
    return subprocess.Popen(
        [sys.executable, "-I", "-c", _CODE, str(_PACKAGE), str(directory)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,  # Ctrl-C, and a launcher that ends a rank, are not meant for it
    )  # fmt: skip


def stop_page(process: subprocess.Popen[str], directory: Path) -> None:
    """End a process that has not written the page of ``directory`` yet, and remove what there is of it."""
    process.kill()
    process.communicate()
    for partial in directory.glob(f".*.{process.pid}.partial"):
        partial.unlink(missing_ok=True)


def finish_page(process: subprocess.Popen[str], seconds: float) -> str:
    """Wait for a process, and return the path of the page.

    RuntimeError with its last line if it has failed; after ``seconds`` it is ended, and TimeoutExpired raised.
    """
    try:
        said, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    if process.returncode:
        raise RuntimeError((errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1])
    return said.strip()
