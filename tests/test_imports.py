"""Data flows one way: recipes -> adaptive_batching.torchtune -> the core; what decides knows no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

CORE = sorted((ROOT / "adaptive_batching").glob("*.py"))
PURE = {
    "config",
    "controller",
    "growth",
    "increase",
    "microbatch",
    "noise_scale",
    "plan",
    "report",
    "result",
    "search",
    "throughput",
}


def imported(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.stem)
def test_the_core_never_imports_torchtune_or_omegaconf(path: Path) -> None:
    found = {name.split(".")[0] for name in imported(path)}
    assert not found & {"torchtune", "omegaconf", "recipes"}
    if path.stem != "plots":
        assert "matplotlib" not in found
    assert not any(name.startswith("adaptive_batching.torchtune") for name in imported(path))


@pytest.mark.parametrize("name", sorted(PURE))
def test_what_decides_imports_no_torch(name: str) -> None:
    names = imported(ROOT / "adaptive_batching" / f"{name}.py")
    assert not any(n.split(".")[0] == "torch" for n in names)
    ours = {n.split(".")[1] for n in names if n.startswith("adaptive_batching.")}
    assert ours <= PURE | {"plots"}


def test_importing_the_package_does_not_import_torchtune() -> None:
    code = "import sys, adaptive_batching; sys.exit('torchtune' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_torchtune_is_imported_in_one_place_only() -> None:
    outside = [p for p in (ROOT / "adaptive_batching").glob("**/*.py") if p.parent.name != "torchtune"]
    assert not [p for p in outside if any(n.split(".")[0] == "torchtune" for n in imported(p))]
