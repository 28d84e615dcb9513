"""Find the line at which a script ends because of a value that it has read: on the emulated device that value is zero.

Pure: a script is given as its source, and lines as numbers. What is found is a condition on a value, never a guess that
there must be one: a loop that ends with its data, or after a number of steps, has none.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Set

_EXITS = ("exit", "quit", "_exit", "abort")  # functions that end a process
_LOOPS = (ast.For, ast.AsyncFor, ast.While)


def condition_on_a_value(source: str, reads: Set[int], steps: Set[int]) -> int | None:
    """Return the line of a condition that ends training, or leaves it out, because of a value; None if there is none.

    Args:
        source: Of a file of the script.
        reads: Lines at which a value of the device was read, on the stack of that moment.
        steps: Lines on the stack when a step was taken; none if none was. Then a condition that passes over what
            follows, or over what is in it, is looked for as well.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    names = _names_of_values(tree, reads)
    conditions = [
        node for node in ast.walk(tree)
        if isinstance(node, (ast.If, ast.While)) and _depends(node.test, reads, names)
        and (not steps or _ends(node, tree, steps))
    ]  # fmt: skip
    if steps:
        return max((node.test.lineno for node in conditions), default=None)
    # Nothing was trained: the first that passes over something has left it out.
    passing = [node for node in conditions if isinstance(node, ast.While) or any(map(_passes_over, ast.walk(node)))]
    return min((node.test.lineno for node in passing), default=None)


def _passes_over(node: ast.AST) -> bool:
    return isinstance(node, (ast.Break, ast.Continue, ast.Return)) or _exits(node) or _trains(node)


def _trains(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("backward", "step")
    )


def _exits(node: ast.AST) -> bool:
    if isinstance(node, ast.Raise):
        return True
    if not isinstance(node, ast.Call):
        return False
    return (node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")) in _EXITS


def _ends(node: ast.If | ast.While, tree: ast.Module, steps: Set[int]) -> bool:
    """True if a condition leaves the loop, or the function, that the steps are taken in."""
    if isinstance(node, ast.While):
        return _holds(node, steps)
    inside = [statement for branch in (*node.body, *node.orelse) for statement in _of_this_function(branch)]
    if any(map(_exits, inside)):
        return True
    outside = [statement for statement in ast.walk(tree) if statement is not node and node.lineno in _lines(statement)]
    for exit_of, scopes in ((ast.Return, (ast.FunctionDef, ast.AsyncFunctionDef)), (ast.Break, _LOOPS)):
        if any(isinstance(statement, exit_of) for statement in inside):
            around = [statement for statement in outside if isinstance(statement, scopes)]
            if around and _holds(max(around, key=lambda scope: scope.lineno), steps):
                return True
    return False


def _holds(node: ast.AST, lines: Set[int]) -> bool:
    return not lines.isdisjoint(_lines(node))


def _lines(node: ast.AST) -> range:
    first = getattr(node, "lineno", None)
    return range(0) if first is None else range(first, (getattr(node, "end_lineno", None) or first) + 1)


def _of_this_function(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            yield from _of_this_function(child)


def _depends(node: ast.AST, reads: Set[int], names: Set[str]) -> bool:
    """True if an expression reads a value, or has a name that one was given."""
    if _holds(node, reads):
        return True
    return any(ast.unparse(name) in names for name in ast.walk(node) if isinstance(name, (ast.Name, ast.Attribute)))


def _names_of_values(tree: ast.Module, reads: Set[int]) -> set[str]:
    """Return the names that values which were read are given, and what is computed from these."""
    names: set[str] = set()
    statements = [
        node for node in ast.walk(tree) if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr))
    ]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    while True:
        before = len(names)
        for node in statements:
            if node.value is not None and _depends(node.value, reads, names):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names |= {ast.unparse(name) for target in targets for name in _named(target)}
        for call in calls:  # as `losses.append(loss.item())`
            assert isinstance(call.func, ast.Attribute)
            if call.func.attr in ("append", "add", "update", "extend") and any(
                _depends(argument, reads, names) for argument in call.args
            ):
                names |= {ast.unparse(call.func.value)}
        if len(names) == before:
            return names


def _named(target: ast.expr) -> Iterator[ast.expr]:
    if isinstance(target, (ast.Tuple, ast.List)):
        for element in target.elts:
            yield from _named(element)
    elif isinstance(target, (ast.Subscript, ast.Starred)):
        yield from _named(target.value)
    else:
        yield target
