"""Data flows one way: recipes and cli -> adaptive_batching.torchtune -> the core; what decides knows no torch."""

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support import house

PACKAGE = ROOT / "adaptive_batching"
OUTER = {"torchtune.py", "_torchtune", "__main__.py", "transformers.py", "_transformers", "axolotl.py", "swift.py"}
SITE = "sitecustomize.py"  # imported by every Python process of a command that we start, on the emulated device for one
MODULES = sorted(PACKAGE.glob("**/*.py"))
CORE = [path for path in MODULES if path.name != SITE and not OUTER & set(path.relative_to(PACKAGE).parts)]
TRAIN = "adaptive_batching._torchtune.train."
# Folders and modules of the core that each of them may import, besides itself; all but growth's face are private.
MAY_IMPORT = {
    "attention": {"device"},
    "mistakes": {"values"},
    "values": set(),
    "config": {"values"},
    "dry_run": {"memory", "mistakes", "report", "values"},
    "environment": {"ranks", "values"},
    "device": set(),
    "memory": {"values"},
    "padding": {"values"},
    "patches": set(),
    "public": {"config", "growth", "loop", "memory", "probe", "values"},
    "ranks": {"memory", "values"},
    "growth": {"values"},
    "loop": {"config", "device", "memory", "probe", "ranks", "state", "step", "values"},
    "probe": {"config", "device", "growth", "memory", "ranks", "state", "undeclared", "values"},
    "report": {"growth", "step", "probe", "values"},
    "state": {"device", "memory", "tensors", "values"},
    "step": {"device", "memory", "probe", "ranks", "state", "tensors", "undeclared", "values"},
    "tensors": {"values"},
    "undeclared": {"state", "tensors"},
}
PURE = {
    room + name
    for room, names in {
        "": "config mistakes padding patches values",
        "memory/": "host_limits shortage",
        "dry_run/": "answer answer_in_words calibration cards compared ends history largest picture process_work times"
        " verdict",
        "dry_run/device/": "__init__ control",
        "dry_run/time/": "forecast seconds step_work",
        "growth/": "batch_size_schedule controller increase learning_rate_scale schedules",
        "step/": "failed_part split forward_times limits row_size share",
        "probe/": "search sizes sizing",
        "report/": "about events facts page record sections summary",
        "torchtune/ppo/": "parts_of_batch",
        "transformers/": "arguments step_plan",
    }.items()
    for name in names.split()
}


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").as_posix().removeprefix("_")


def imported(path: Path, *, at_once: bool = False) -> set[str]:
    """Modules that ``path`` imports; ``at_once`` leaves aside what functions import."""
    tree = house.trees()[path.relative_to(ROOT)]
    names = set()
    for node in house.at_load(tree) if at_once else ast.walk(tree):
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


def roots(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imported(path)}


@pytest.mark.parametrize("path", CORE, ids=name_of)
def test_the_core_never_imports_torchtune_and_its_rooms_import_in_one_direction(path: Path) -> None:
    assert not roots(path) & {"torchtune", "omegaconf", "recipes", "matplotlib", "transformers"}
    assert not any(name.startswith(("torchtune", "transformers", "_main")) for name in ours(path))
    if path.stem != "__init__":
        room = name_of(path).split("/")[0]
        assert {name.split("/")[0] for name in ours(path)} <= MAY_IMPORT[room] | {room}


def test_what_needs_no_card_is_a_room_of_its_own_whose_device_and_times_know_nothing_of_a_dry_run() -> None:
    """Only the command line calls it."""
    of_plans = {f"torchtune/cli/{name}" for name in ("plan", "one_plan", "several_plans")}
    callers = {name_of(path) for path in MODULES if any(name.startswith("dry_run") for name in ours(path))}
    assert {name for name in callers if not name.startswith("dry_run/")} == {"_main__", *of_plans}
    for room, used in {"device": {"mistakes", "values"}, "time": {"dry_run/cards"}}.items():
        of_room = [path for path in (PACKAGE / "_dry_run" / room).rglob("*.py") if path.name != SITE]
        found = {name for path in of_room for name in ours(path)}
        assert {name for name in found if not name.startswith(f"dry_run/{room}")} <= used


@pytest.mark.parametrize("path", sorted((PACKAGE / "_torchtune").glob("*/*.py")), ids=name_of)
def test_rooms_of_the_recipes_import_from_lower_ones_alone(path: Path) -> None:
    rooms = ["stock", "train", "ppo", "cli"]
    own = rooms.index(path.parent.name)
    imported_rooms = {parts[1] for parts in (name.split("/") for name in ours(path)) if parts[0] == "torchtune"}
    assert not imported_rooms & {*rooms[own + 1 :]}
    assert own == rooms.index("cli") or "recipe_classes" not in imported_rooms
    assert not any(name.startswith("main") for name in ours(path))


def test_ppo_calls_the_room_that_trains_and_none_of_its_classes_is_called_back_from_there() -> None:
    """A recipe is a mixin, and work is an interface; nothing else there may leave a gap that PPO fills."""
    bases, overridden = set[str](), set[str]()
    for path in (PACKAGE / "_torchtune" / "ppo").glob("*.py"):
        module = importlib.import_module(f"adaptive_batching._torchtune.ppo.{path.stem}")
        for kind in vars(module).values():
            if isinstance(kind, type) and kind.__module__ == module.__name__:
                of_train = [base for base in kind.__mro__ if base.__module__.startswith(TRAIN)]
                bases |= {base.__name__ for base in of_train}
                if kind.__name__ != "AdaptivePPO":
                    private = {name for name in vars(kind) if name[0] == "_" != name[-1] and name != "_abc_impl"}
                    overridden |= {name for base in of_train for name in private & vars(base).keys()}
    assert bases == {"AdaptiveBatching", "RecipeWork"}
    assert not overridden


def test_ppo_is_known_to_the_list_of_recipes_and_the_public_module_alone() -> None:
    room = "torchtune/ppo/"
    outside = [path for path in MODULES if not name_of(path).startswith(room)]
    callers = {name_of(path) for path in outside if any(name.startswith(room) for name in ours(path))}
    naming = {name_of(path) for path in outside if "ppo_full_finetune" in path.read_text()}
    assert callers == {"torchtune", "torchtune/recipe_classes"} and naming == {"torchtune/recipe_classes"}


@pytest.mark.parametrize("name", sorted(PURE))
def test_what_decides_imports_no_torch(name: str) -> None:
    path = PACKAGE / f"_{name}.py"
    assert "torch" not in roots(path)
    assert ours(path) <= PURE


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_torchtune_is_imported_in_one_place_only(path: Path) -> None:
    assert PACKAGE / "_torchtune" in path.parents or "torchtune" not in roots(path)


def test_no_code_of_a_user_runs_on_fake_tensors() -> None:
    assert not [path for path in MODULES if "FakeTensorMode" in path.read_text()]


IN_FORKS = """
import importlib.machinery, json, os, sys
import adaptive_batching
import adaptive_batching.__main__ as cli
adaptive_batching.growth.step()
find = importlib.machinery.PathFinder.find_spec
ended = []
for number, (arguments, hidden) in enumerate(json.loads(sys.argv[1])):
    if arguments == "env":
        import torch
    if not os.fork():
        os.dup2(os.open(f"{sys.argv[2]}/{number}", os.O_CREAT | os.O_WRONLY), 1)
        os.dup2(1, 2)
        importlib.machinery.PathFinder.find_spec = lambda name, *rest: None if name == hidden else find(name, *rest)
        sys.argv[1:] = arguments.split()
        try:
            sys.exit(cli.main())
        finally:
            print("Imported", *sys.modules, flush=True)
    ended.append(os.waitstatus_to_exitcode(os.wait()[1]))
print(json.dumps(ended))
"""
NEED_NO_TORCH = ["--version", "--help", "report --help"]
WITHOUT_TORCHTUNE = [
    ("--version", 0, "adaptive-batching 0"),
    ("--help", 0, "validate"),
    ("report --help", 0, "Make the page"),
    ("env", 0, "recovery:"),
    ("run x", 2, "error: run needs torchtune's recipes, but torchtune is not installed; pip install"),
]


Ran = dict[tuple[str, str], tuple[int, str, set[str]]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """How each command ended, without a module, what it said and what was imported, in a fork of a new process."""
    runs = [*((each, "") for each in NEED_NO_TORCH), *((each, "torchtune") for each, *_ in WITHOUT_TORCHTUNE)]
    folder = tmp_path_factory.mktemp("commands")
    command = [sys.executable, "-c", IN_FORKS, json.dumps(runs), str(folder)]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    told = [(folder / str(number)).read_text().rpartition("Imported") for number in range(len(runs))]
    found = zip(runs, json.loads(done.stdout), told, strict=True)
    return {run: (status, said, set(modules.split())) for run, status, (said, _, modules) in found}


@pytest.mark.xdist_group("commands")
@pytest.mark.parametrize("arguments", NEED_NO_TORCH)
def test_importing_the_package_and_a_command_that_needs_no_torch_import_none(arguments: str, ran: Ran) -> None:
    _, said, modules = ran[arguments, ""]
    assert "Traceback" not in said and "adaptive_batching._growth.schedules" in modules
    assert not {"torch", "torchtune", "omegaconf", "numpy"} & modules


@pytest.mark.xdist_group("commands")
@pytest.mark.parametrize(("arguments", "status", "said"), WITHOUT_TORCHTUNE)
def test_what_works_without_torchtune_and_what_says_that_it_is_missing(
    arguments: str, status: int, said: str, ran: Ran
) -> None:
    ended, output, _ = ran[arguments, "torchtune"]
    assert (ended, "Traceback" in output) == (status, False), output
    assert said in output


def test_no_two_files_share_a_name_none_import_each_other_in_a_circle_and_one_loop_retries() -> None:
    assert (house.twin_names(), house.cycles(), len(house.retry_loops())) == ([], [], 1)
