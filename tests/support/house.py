"""Count what makes the library large or hard to find one's way in.

    python -m tests.support.house

It prints where each of them is, and last a JSON object. Counting is not judging: that is reading.
"""

from __future__ import annotations

import ast
import functools
import io
import json
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from adaptive_batching._patches import PRIVATE

ROOT = Path(__file__).parents[2]
PACKAGE = "adaptive_batching"
MAX_LINES, MAX_PARAMETERS = 50, 6
OTHERS = ("torch", "torchtune", "torchao")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """Return what each file of the package says, by its path in the repository."""
    return {path.relative_to(ROOT): ast.parse(path.read_text()) for path in sorted((ROOT / PACKAGE).rglob("*.py"))}


def lines_of(folder: str) -> int:
    return sum(len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py"))


def functions(tree: ast.Module) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def length_of(function: Function) -> int:
    """Return the lines of a function without those of its docstring."""
    docstring = ast.get_docstring(function, clean=False)
    of_docstring = 0 if docstring is None else docstring.count("\n") + 1
    return (function.end_lineno or function.lineno) - function.lineno + 1 - of_docstring


def parameters_of(function: Function) -> int:
    args = function.args
    return sum(each.arg not in ("self", "cls") for each in (*args.posonlyargs, *args.args, *args.kwonlyargs))


def at_load(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield what runs where a module is loaded: all that is in no function."""
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        yield node
        nodes += [child for child in ast.iter_child_nodes(node) if not isinstance(child, Function)]


def imports_of(tree: ast.Module, modules: set[str]) -> set[str]:
    """Return the modules of the package that are imported where a module is loaded."""
    imported: set[str] = set()
    for node in at_load(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names} & modules
            imported |= names or {node.module} & modules
    return imported


def cycles() -> list[str]:
    """Return modules, and rooms of them, that lead back to the first of them, if there are any."""
    modules = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): tree for path, tree in trees().items()}
    graph = {name: imports_of(tree, {*modules}) - {name} for name, tree in modules.items()}
    of_rooms: dict[str, set[str]] = {}
    for name, imported in graph.items():
        room, *others = (".".join(each.split(".")[:2]) for each in (name, *imported))
        of_rooms[room] = of_rooms.get(room, set()) | {*others} - {room, PACKAGE}
    return [" -> ".join(cycle) for cycle in map(cycle_of, (graph, of_rooms)) if cycle]


def cycle_of(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def twin_names() -> list[str]:
    by_python = ("__", "sitecustomize.")  # which expects these names
    times = Counter(path.name for path in trees() if not path.name.startswith(by_python))
    return [name for name, number in times.items() if number > 1]


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


def retry_loops() -> list[str]:
    """Return the places of loops that go on because something has failed."""
    return [
        f"{path}:{node.lineno}"
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.While) and "failed" in names_in(node)
    ]


def names_in(tree: ast.AST) -> list[str]:
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute)]
    return [node.id if isinstance(node, ast.Name) else node.attr for node in nodes]


def comments_of(path: Path) -> int:
    """Return how many comments a file has, each of consecutive lines counted once; none that speak to a tool."""
    tokens = tokenize.generate_tokens(io.StringIO((ROOT / path).read_text()).readline)
    comments = [token for token in tokens if token.type == tokenize.COMMENT]
    lines = [each.start[0] for each in comments if not re.match(r"# (noqa|type:|fmt:|pragma)", each.string)]
    return sum(line - 1 not in lines for line in lines)


def main() -> None:
    long, wide, once = list[str](), list[str](), list[str]()
    for path, tree in trees().items():
        uses = Counter(names_in(tree))
        for function in functions(tree):
            where, length = f"{path}:{function.lineno} {function.name}", length_of(function)
            if length > MAX_LINES:
                long.append(f"{where}, {length}")
            if parameters_of(function) > MAX_PARAMETERS:
                wide.append(f"{where}, {parameters_of(function)}")
            if _is_private(function.name) and uses[function.name] == 1 and not function.decorator_list:
                once.append(f"{where}, {length}")
    private = {f"{path}: {name}" for path, tree in trees().items() for name in {*private_names(tree)} - {*PRIVATE}}
    places = {
        "functions_over_50_lines": long, "over_6_parameters": wide, "twin_names": twin_names(), "cycles": cycles(),
        "private_functions_used_once": once, "retry_loops": retry_loops(), "private_names_outside_patches": private,
    }  # fmt: skip
    for what, where_it_is in places.items():
        print(f"{what}:", *where_it_is, sep="\n  ")
    lines = lines_of(PACKAGE)
    counts = {what: len(where_it_is) for what, where_it_is in places.items()}
    comments, of_tests = sum(map(comments_of, trees())), lines_of("tests")
    shares = {"comments_per_100_lines": 100 * comments / lines, "test_lines_over_library": of_tests / lines}
    print(json.dumps({**counts, "library_lines": lines, **{key: round(value, 2) for key, value in shares.items()}}))


if __name__ == "__main__":
    main()
