"""The recipes that torchtune ships: loaded, and with functions that they call replaced."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torchtune
from torchtune import training
from torchtune.recipe_interfaces import FTRecipeInterface


def load_stock(name: str) -> ModuleType:
    """Load an installed stock recipe, such as ``"full_finetune_single_device"``, as a module.

    They are loaded by path, as ``tune run`` itself does: torchtune's ``recipes`` is no importable package.

    Raises:
        FileNotFoundError: If the installed torchtune ships no such recipe.
    """
    module_name = f"_torchtune_stock_{name}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    path = Path(torchtune.__file__).parent.parent / "recipes" / f"{name}.py"
    if not path.is_file():
        raise FileNotFoundError(f"torchtune {torchtune.__version__} has no recipe {name!r} (looked for {path})")
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # before execution, so that what it defines can be pickled
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def stock_recipe(name: str) -> type[Any]:
    """Return the class of a stock recipe that trains."""
    defined = vars(load_stock(name)).values()
    [recipe] = [value for value in defined if isinstance(value, type) and FTRecipeInterface in value.__mro__[1:]]
    return recipe


@contextlib.contextmanager
def replaced_in(owner: Any, **functions: Callable[..., Any]) -> Iterator[None]:
    replaced = {name: getattr(owner, name) for name in functions}
    for name, function in functions.items():
        setattr(owner, name, function)
    try:
        yield
    finally:
        for name, function in replaced.items():
            setattr(owner, name, function)


replaced_in_torchtune = partial(replaced_in, training)
"""Replaces functions of ``torchtune.training`` as the stock recipes see them."""
