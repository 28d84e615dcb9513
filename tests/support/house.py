"""Count what makes the library large or hard to find one's way in.

    python -m tests.support.house

It prints where each of them is, and last a JSON object. Counting is not judging: that is reading.
"""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from adaptive_batching._patches import PRIVATE

ROOT = Path(__file__).parents[2]
PACKAGE = "adaptive_batching"
MAX_LINES, MAX_PARAMETERS = 50, 6
OTHERS = ("torch", "torchtune", "torchao")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def files_of(folder: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", f"{folder}/*.py"], cwd=ROOT, text=True, check=True, capture_output=True)
    return [Path(name) for name in listed.stdout.split()]


def lines_of(paths: list[Path]) -> int:
    return sum(len((ROOT / path).read_text().splitlines()) for path in paths)


def functions(tree: ast.Module) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def length_of(function: Function) -> int:
    """Return the lines of a function without those of its docstring."""
    docstring = ast.get_docstring(function, clean=False)
    of_docstring = 0 if docstring is None else docstring.count("\n") + 1
    return (function.end_lineno or function.lineno) - function.lineno + 1 - of_docstring


def parameters_of(function: Function) -> int:
    args = function.args
    names = [parameter.arg for parameter in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def functions_with(trees: dict[Path, ast.Module], measure: Callable[[Function], int], over: int) -> list[str]:
    measured = [(path, function, measure(function)) for path, tree in trees.items() for function in functions(tree)]
    return [f"{path}:{function.lineno} {function.name}, {size}" for path, function, size in measured if size > over]


def module_of(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(tree: ast.Module, modules: set[str]) -> set[str]:
    """Return the modules of the package that are imported where a module is loaded."""
    imported: set[str] = set()
    inside = {node for function in functions(tree) for node in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node not in inside:
            names = {f"{node.module}.{alias.name}" for alias in node.names} & modules
            imported |= names or {node.module} & modules
    return imported


def cycle_of(graph: dict[str, set[str]]) -> list[str]:
    """Return nodes that lead back to the first of them, if there are any."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def private_names(tree: ast.Module) -> Iterator[str]:
    """Yield names of other packages that start with an underscore, as they are imported or reached by attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in OTHERS:
            private = any(map(_is_private, node.module.split(".")))
            yield from (f"{node.module}.{a.name}" for a in node.names if private or _is_private(a.name))
        elif isinstance(node, ast.Attribute) and _is_private(node.attr):
            owner = ast.unparse(node.value)
            if owner.split(".")[0] in OTHERS and f"{owner}.{node.attr}" != "torch._C":  # what is taken of it counts
                yield f"{owner}.{node.attr}"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def retry_loops(tree: ast.Module) -> Iterator[int]:
    """Yield the lines of loops that go on because something has failed."""
    for node in ast.walk(tree):
        if isinstance(node, ast.While):
            names = {getattr(part, "attr", getattr(part, "id", "")) for part in ast.walk(node)}
            yield from [node.lineno] if "failed" in names else []


def used_once(trees: dict[Path, ast.Module]) -> Iterator[str]:
    """Yield private functions that are named in one other place of their file, so that they could stand there."""
    for path, tree in trees.items():
        uses = Counter(
            node.id if isinstance(node, ast.Name) else node.attr
            for node in ast.walk(tree)
            if isinstance(node, (ast.Name, ast.Attribute))
        )
        for function in functions(tree):
            if _is_private(function.name) and uses[function.name] == 1 and not function.decorator_list:
                yield f"{path}:{function.lineno} {function.name}, {length_of(function)}"


def comments_of(path: Path) -> int:
    """Return how many comments a file has, each of consecutive lines counted once; none that speak to a tool."""
    tokens = tokenize.generate_tokens(io.StringIO((ROOT / path).read_text()).readline)
    lines = [
        token.start[0]
        for token in tokens
        if token.type == tokenize.COMMENT and not re.match(r"# (noqa|type:|fmt:|pragma)", token.string)
    ]
    return sum(line - 1 not in lines for line in lines)


def count() -> dict[str, Any]:
    """Return all figures, and print where what is counted lies."""
    paths = files_of(PACKAGE)
    trees = {path: ast.parse((ROOT / path).read_text()) for path in paths}
    modules = {module_of(path): path for path in paths}
    graph = {name: imports_of(trees[path], {*modules}) - {name} for name, path in modules.items()}
    rooms = {name: ".".join(name.split(".")[:2]) for name in modules}
    of_rooms = {
        room: {rooms[other] for name in graph if rooms[name] == room for other in graph[name]} - {room, PACKAGE}
        for room in {*rooms.values()}
    }
    places: dict[str, list[str]] = {
        "functions_over_50_lines": functions_with(trees, length_of, over=MAX_LINES),
        "over_6_parameters": functions_with(trees, parameters_of, over=MAX_PARAMETERS),
        "twin_names": [
            name
            for name, times in Counter(path.name for path in paths).items()
            if times > 1 and not name.startswith("__")
        ],
        "cycles": [" -> ".join(cycle) for cycle in (cycle_of(graph), cycle_of(of_rooms)) if cycle],
        "private_functions_used_once": [*used_once(trees)],
        "retry_loops": [f"{path}:{line}" for path, tree in trees.items() for line in retry_loops(tree)],
        "private_names_outside_patches": [
            f"{path}: {name}" for path, tree in trees.items() for name in private_names(tree) if name not in PRIVATE
        ],
    }
    for what, where in places.items():
        print(f"{what}:", *where, sep="\n  ")
    lines = lines_of(paths)
    counts = {what: len(where) for what, where in places.items()}
    num_functions = sum(1 for tree in trees.values() for _ in functions(tree))
    return {
        "library_lines": lines,
        "files": len(paths),
        **counts,
        "functions_per_100_lines": round(100 * num_functions / lines, 1),
        "comments_per_100_lines": round(100 * sum(map(comments_of, paths)) / lines, 1),
        "test_lines_over_library": round(lines_of(files_of("tests")) / lines, 2),
    }


if __name__ == "__main__":
    print(json.dumps(count()))
