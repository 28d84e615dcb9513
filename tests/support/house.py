"""Count what makes the library large or hard to find one's way in.

    python -m tests.support.house

It prints where each of them is, and last a JSON object. Counting is not judging: that is reading.
"""

from __future__ import annotations

import ast
import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    given = function.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def module_of(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(tree: ast.Module, modules: set[str]) -> set[str]:
    """Return the modules of the package that are imported where a module is loaded."""
    found: set[str] = set()
    inside = {each for function in functions(tree) for each in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node not in inside:
            names = {f"{node.module}.{alias.name}" for alias in node.names} & modules
            found |= names or {node.module} & modules
    return found


def cycles_of(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return groups of nodes that can each be reached from all others of the group."""
    reached = {node: _from(node, graph) for node in graph}
    groups = {frozenset(other for other in reached[node] if node in reached[other]) for node in graph}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def _from(start: str, graph: dict[str, set[str]]) -> set[str]:
    seen, waiting = set[str](), [start]
    while waiting:
        for node in graph[waiting.pop()] - seen:
            seen.add(node)
            waiting.append(node)
    return seen


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


def _value_of(name: str, tree: ast.Module) -> ast.expr:
    [value] = [n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == name]
    return value


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def retry_loops(tree: ast.Module) -> Iterator[int]:
    """Yield the lines of loops that go on because something has failed."""
    for node in ast.walk(tree):
        if isinstance(node, ast.While):
            inside = list(ast.walk(node))
            if any(isinstance(each, ast.Attribute) and each.attr == "failed" for each in inside):
                yield node.lineno


def count() -> dict[str, Any]:
    """Return all figures, and print where what is counted lies."""
    paths = files_of(PACKAGE)
    trees = {path: ast.parse((ROOT / path).read_text()) for path in paths}
    listed = ast.literal_eval(_value_of("PRIVATE", trees[Path(PACKAGE, "_patches.py")]))
    modules = {module_of(path): path for path in paths}
    graph = {name: imports_of(trees[path], {*modules}) - {name} for name, path in modules.items()}
    rooms = {name: ".".join(name.split(".")[:2]) for name in modules}
    of_rooms = {
        room: {rooms[other] for name in graph if rooms[name] == room for other in graph[name]} - {room, PACKAGE}
        for room in {*rooms.values()}
    }
    found: dict[str, list[str]] = {
        "functions_over_50_lines": [
            f"{path}:{function.lineno} {function.name}, {length_of(function)}"
            for path, tree in trees.items()
            for function in functions(tree)
            if length_of(function) > MAX_LINES
        ],
        "over_6_parameters": [
            f"{path}:{function.lineno} {function.name}, {parameters_of(function)}"
            for path, tree in trees.items()
            for function in functions(tree)
            if parameters_of(function) > MAX_PARAMETERS
        ],
        "twin_names": [
            name
            for name, times in Counter(path.name for path in paths).items()
            if times > 1 and not name.startswith("__")
        ],
        "cycles": [" <-> ".join(group) for group in (*cycles_of(graph), *cycles_of(of_rooms))],
        "retry_loops": [f"{path}:{line}" for path, tree in trees.items() for line in retry_loops(tree)],
        "private_names_outside_patches": [
            f"{path}: {name}" for path, tree in trees.items() for name in private_names(tree) if name not in listed
        ],
    }
    for what, where in found.items():
        print(f"{what}:", *where, sep="\n  ")
    lines = lines_of(paths)
    counts = {what: len(where) for what, where in found.items()}
    ratio = round(lines_of(files_of("tests")) / lines, 2)
    return {"library_lines": lines, "files": len(paths), **counts, "test_lines_over_library": ratio}


if __name__ == "__main__":
    print(json.dumps(count()))
