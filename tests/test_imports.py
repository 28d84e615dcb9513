"""Data flows one way: recipes and cli -> adaptive_batching.torchtune -> the core; what decides knows no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support import house

PACKAGE = ROOT / "adaptive_batching"
OUTER = ("torchtune.py", "_torchtune", "_cli", "__main__.py")
SITE = "sitecustomize.py"  # imported by every Python process on the emulated device
CORE = sorted(
    path
    for path in PACKAGE.glob("**/*.py")
    if path.name != SITE and not set(OUTER) & set(path.relative_to(PACKAGE).parts)
)
MEMORY = {"memory", "out_of_memory"}
# Folders and modules of the core that each of them may import, besides itself; all but growth's face are private.
MAY_IMPORT = {
    "values": set(),
    "config": {"values"},
    "emulated_device": {"values"},
    "device": set(),
    "memory": {"host_memory"},
    "out_of_memory": set(),
    "patches": set(),
    "host_memory": set(),
    "ranks": {"host_memory", "out_of_memory", "values"},
    "growth": {"values"},
    "loop": {"config", "device", "micro_batches", "probe", "ranks", "trace", "values"} | MEMORY,
    "micro_batches": {"device", "probe", "ranks", "values"} | MEMORY,
    "plan": {"probe", "trace", "values"},
    "probe": {"config", "device", "host_memory", "ranks", "trace", "values"} | MEMORY,
    "report": {"growth", "micro_batches", "probe", "values"},
    "trace": {"ranks"},
}
PURE = [
    "config",
    "emulated_device/build",
    "emulated_device/control",
    "growth/course",
    "growth/epoch",
    "growth/increase",
    "growth/noise_scale",
    "growth/schedules",
    "micro_batches/cut",
    "micro_batches/fastest",
    "micro_batches/forward_cost",
    "micro_batches/limits",
    "patches",
    "plan",
    "probe/search",
    "probe/sizes",
    "report/curves",
    "report/events",
    "report/facts",
    "report/page",
    "report/record",
    "report/sections",
    "trace/allocator",
    "trace/reserved",
    "trace/scratch",
    "trace/traced_step",
    "values",
]

# What records a trace stands on private names of torch, and is imported when a probe first needs it.
RECORDS = {f"trace/{name}" for name in ("compiled", "fake_step", "fsdp_units", "fusion", "recorder")}


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").as_posix().removeprefix("_")


def imported(path: Path, *, at_once: bool = False) -> set[str]:
    """Modules that ``path`` imports; ``at_once`` leaves aside what functions import."""
    tree = ast.parse(path.read_text())
    names = set()
    for node in tree.body if at_once else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def ours(path: Path, *, at_once: bool = False) -> set[str]:
    """Modules of the package that ``path`` imports, as :func:`name_of` writes them."""
    names = imported(path, at_once=at_once)
    found = [name.split(".", 1)[1] for name in names if name.startswith("adaptive_batching.")]
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


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("**/*.py")), ids=name_of)
def test_what_records_a_trace_is_imported_by_itself_alone_until_a_trace_is_made(path: Path) -> None:
    if name_of(path) not in RECORDS:
        assert not ours(path, at_once=True) & RECORDS
        private = [name for name in imported(path, at_once=True) if name.startswith("torch.") and "._" in name]
        assert not private or not name_of(path).startswith("trace/")


def test_importing_the_package_imports_nothing_that_records_a_trace() -> None:
    code = "import sys, adaptive_batching.torchtune; sys.exit('torch' not in sys.modules or any(\n"
    code += "    name.removeprefix('adaptive_batching._').replace('.', '/') in {} for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code.format(RECORDS)], cwd=ROOT, check=False).returncode == 0


def test_importing_the_package_does_not_import_torchtune_nor_does_its_command_for_pages() -> None:
    code = "import sys, adaptive_batching.__main__ as cli; sys.argv[1:] = ['report', '--help']\n"
    code += "try: cli.main()\nexcept SystemExit: sys.exit('torchtune' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_torchtune_is_imported_in_one_place_only() -> None:
    outside = [p for p in PACKAGE.glob("**/*.py") if PACKAGE / "_torchtune" not in p.parents]
    assert not [p for p in outside if any(n.split(".")[0] == "torchtune" for n in imported(p))]


def test_no_two_files_share_a_name_and_none_import_each_other_in_a_circle() -> None:
    found = house.count()
    assert (found["twin_names"], found["cycles"], found["retry_loops"]) == (0, 0, 1)
