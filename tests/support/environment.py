"""Environments of the processes that tests start."""

from __future__ import annotations

import venv
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

# glibc keeps and scatters freed memory; so told, it gives it back, and the limit is repeatable to one sample.
TAME_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}

OF_THE_RECIPES = ("datasets", "matplotlib", "numpy", "omegaconf", "torchao", "torchdata", "torchtune", "tqdm")
"""Packages that recipes, their data and pictures take, and a plain loop does without."""


def make_environment_of(package: str, folder: Path) -> tuple[Path, Path]:
    """Make a virtual environment of ``package`` and what it requires, as links; return its Python and its packages."""
    venv.create(folder, symlinks=True)
    [packages] = folder.glob("lib/python*/site-packages")
    for name in required_by(package):
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(str(found.locate_file(top))).resolve())
    return folder / "bin" / "python", packages


def required_by(package: str) -> set[str]:
    """Return the names of ``package`` and of all that it requires here, without extras."""
    names, new = set(), {package}
    while new:
        names |= new
        required = [Requirement(line) for name in new for line in distribution(name).requires or []]
        new = {r.name for r in required if r.marker is None or r.marker.evaluate({"extra": ""})} - names
    return names
