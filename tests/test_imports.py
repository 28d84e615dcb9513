"""Data flows one way: recipes and cli -> adaptive_batching.torchtune -> the core; what decides knows no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

PACKAGE = ROOT / "adaptive_batching"
OUTER = ("torchtune.py", "_torchtune", "_cli", "__main__.py")
SITE = "sitecustomize.py"  # imported by every Python process on the emulated device
CORE = sorted(
    path
    for path in PACKAGE.glob("**/*.py")
    if path.name != SITE and not set(OUTER) & set(path.relative_to(PACKAGE).parts)
)
# Folders and modules of the core that each of them may import, besides itself; all but growth's face are private.
MAY_IMPORT = {
    "values": set(),
    "config": {"probe", "values"},  # of the probe, the names of the searches
    "emulated_device": {"values"},
    "copies": set(),
    "memory": {"host_memory"},
    "host_memory": set(),
    "random_state": set(),
    "ranks": {"host_memory", "memory"},
    "growth": set(),
    "loop": {"config", "copies", "memory", "micro_batches", "probe", "random_state", "ranks", "values"},
    "micro_batches": {"memory", "random_state", "ranks"},
    "plan": {"probe", "values"},
    "probe": {"config", "host_memory", "memory", "random_state", "ranks", "values"},
    "report": {"growth", "micro_batches", "probe", "values"},
}
PURE = [
    "config",
    "emulated_device/build",
    "emulated_device/control",
    "emulated_device/launch",
    "growth/accumulation",
    "growth/by_epoch",
    "growth/controller",
    "growth/course",
    "growth/epoch",
    "growth/increase",
    "growth/noise_scale",
    "growth/schedules",
    "micro_batches/cut",
    "micro_batches/fastest",
    "micro_batches/forward_cost",
    "micro_batches/limits",
    "plan",
    "probe/allocator",
    "probe/corrected_curve",
    "probe/curve",
    "probe/ledger",
    "probe/reserved",
    "probe/result",
    "probe/scratch",
    "probe/search",
    "probe/sizes",
    "report/apart",
    "report/curves",
    "report/events",
    "report/markup",
    "report/page",
    "report/paste",
    "report/record",
    "report/rows",
    "report/sections",
    "report/text",
    "report/watcher",
    "values",
]


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").as_posix().removeprefix("_")


def imported(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def ours(path: Path) -> set[str]:
    """Modules of the package that ``path`` imports, as :func:`name_of` writes them."""
    found = [name.split(".", 1)[1] for name in imported(path) if name.startswith("adaptive_batching.")]
    return {name.removeprefix("_").replace(".", "/") for name in found}


@pytest.mark.parametrize("path", CORE, ids=name_of)
def test_the_core_never_imports_torchtune_or_omegaconf(path: Path) -> None:
    found = {name.split(".")[0] for name in imported(path)}
    assert not found & {"torchtune", "omegaconf", "recipes"}
    assert "matplotlib" not in found
    assert not any(name.startswith(("torchtune", "cli")) for name in ours(path))


@pytest.mark.parametrize("path", [path for path in CORE if path.stem != "__init__"], ids=name_of)
def test_rooms_of_the_core_import_in_one_direction(path: Path) -> None:
    room = name_of(path).split("/")[0]
    assert {name.split("/")[0] for name in ours(path)} <= MAY_IMPORT[room] | {room}


@pytest.mark.parametrize("name", PURE)
def test_what_decides_imports_no_torch(name: str) -> None:
    path = PACKAGE / f"_{name}.py"
    assert not any(n.split(".")[0] == "torch" for n in imported(path))
    assert ours(path) <= set(PURE)


def test_importing_the_package_does_not_import_torchtune_nor_does_its_command_for_pages() -> None:
    code = "import sys, adaptive_batching._cli.main as cli; sys.argv[1:] = ['report', '--help']\n"
    code += "try: cli.main()\nexcept SystemExit: sys.exit('torchtune' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_torchtune_is_imported_in_one_place_only() -> None:
    outside = [p for p in PACKAGE.glob("**/*.py") if PACKAGE / "_torchtune" not in p.parents]
    assert not [p for p in outside if any(n.split(".")[0] == "torchtune" for n in imported(p))]
