"""The public interface: the names and signatures that users rely on. A change here is a change for them.

They are in public_interface.txt. To write it: python -m tests.test_api
"""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import adaptive_batching
from adaptive_batching import AdaptiveBatchingConfig, attention, growth, torchtune, transformers
from tests.conftest import ROOT

EXPECTED = Path(__file__).with_name("public_interface.txt")
MODULES = (adaptive_batching, attention, growth, torchtune, transformers)

OF_STACKS = {"adaptive_batching.axolotl", "adaptive_batching.swift"}
"""Modules that a framework loads, where it is installed."""


def described(package: Any, name: str) -> Iterator[str]:
    """Lines that say what a user can call: arguments without types, and ``=...`` for a default.

    What a public base has with the same arguments is left out.
    """
    found = getattr(package, name)
    if inspect.ismodule(found):
        yield f"{name} (module)"
    elif not inspect.isclass(found):
        yield f"{name}{arguments(found)}" if inspect.isfunction(found) else name
    elif issubclass(found, Exception):
        yield f"{name}({', '.join(base.__name__ for base in found.__bases__)})"
    else:
        # Its arguments are the settings, which have a page of their own.
        yield name if found is AdaptiveBatchingConfig else f"{name}{arguments(found)}"
        fields = {field.name for field in dataclasses.fields(found)} if dataclasses.is_dataclass(found) else set()
        bases = [base.__name__ for base in found.__mro__[1:] if base.__name__ in package.__all__]
        known = {line.removeprefix(f"{base}.") for base in bases for line in described(package, base)}
        for member, value in vars(found).items():
            if not member.startswith("_") or member == "__call__":
                value = getattr(value, "__func__", value)  # of a classmethod
                line = f"{member}{arguments(value)}" if inspect.isfunction(value) else member
                if line not in known | fields:
                    yield f"{name}.{line}"


def arguments(function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    parameters = [
        p.replace(annotation=p.empty, default=p.default if p.default is p.empty else ...)
        for p in signature.parameters.values()
    ]
    return str(inspect.Signature(parameters)).replace("=Ellipsis", "=...")


def interface() -> str:
    return "\n".join(
        "\n".join([f"[{module.__name__}]", *(line for name in module.__all__ for line in described(module, name)), ""])
        for module in MODULES
    )


def test_names_and_signatures_are_stable() -> None:
    assert interface() == EXPECTED.read_text()


def test_what_is_not_public_is_private_by_name() -> None:
    modules = {name for _, name, _ in pkgutil.walk_packages(adaptive_batching.__path__, "adaptive_batching.")}
    modules = {name for name in modules if not name.startswith("adaptive_batching.recipes")}  # stands for recipes/
    public = {name for name in modules if not any(part.startswith("_") for part in name.split("."))}
    assert public == {*(module.__name__ for module in MODULES), *OF_STACKS} - {"adaptive_batching"}
    for module in MODULES:
        names = {name for name in dir(module) if not name.startswith("_")}
        names -= {"recipes", *(name.removeprefix("adaptive_batching.") for name in public)}
        assert names == set(module.__all__) - {"growth"}, module


def test_all_that_is_public_is_typed_listed_and_has_a_docstring() -> None:
    listed = adaptive_batching.__doc__ or ""
    for name in adaptive_batching.__all__:
        assert f"``{name}``" in listed, name
        assert getattr(adaptive_batching, name).__doc__ or name == "IncreaseFunction", name
    assert (ROOT / "adaptive_batching" / "py.typed").exists()
    for found in (getattr(module, name) for module in MODULES for name in module.__all__):
        if inspect.isfunction(found):
            untyped = [p.name for p in inspect.signature(found).parameters.values() if p.annotation is p.empty]
            assert not untyped, (found, untyped)


if __name__ == "__main__":
    EXPECTED.write_text(interface())
