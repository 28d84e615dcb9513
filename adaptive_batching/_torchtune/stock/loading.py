"""The recipes that torchtune ships: loaded, and with functions that they call replaced."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torchtune
from torchtune import training
from torchtune.recipe_interfaces import FTRecipeInterface

from adaptive_batching._values import Mistake, install_extra, told

_OLDEST_HARNESS = (0, 4, 8)
"""Version of lm_eval from which on the harness runs the windows of all texts together."""


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


@told()  # as a recipe is loaded before anything else would
def load_stock_evaluation() -> ModuleType:
    """Load stock's recipe for evaluation, which needs EleutherAI's harness.

    Raises:
        Mistake: If the harness is missing, or too old, or does not go with what is installed.
    """
    remedy = install_extra("eval")
    try:
        installed = importlib.metadata.version("lm-eval")
        if tuple(map(int, re.findall(r"\d+", installed)[:3])) < _OLDEST_HARNESS:
            oldest = ".".join(map(str, _OLDEST_HARNESS))
            raise Mistake(
                f"error: eleuther_eval needs lm_eval {oldest} or later, but {installed} is installed; {remedy}"
            )
        return load_stock("eleuther_eval")
    except importlib.metadata.PackageNotFoundError:
        raise Mistake(f"error: eleuther_eval needs lm_eval, which is not installed; {remedy}") from None
    except (ImportError, AttributeError) as error:  # a package that it needs, or a name that this one has lost
        raise Mistake(f"error: lm_eval {installed} cannot be imported ({error}); {remedy}") from error


def any_version_of_the_harness() -> contextlib.AbstractContextManager[None]:
    """Have stock's check pass, which compares versions as text: by that, 0.4.10 comes before 0.4.5."""
    version = importlib.metadata.version
    return replaced_in(importlib.metadata, version=lambda name: "0.4.5" if name == "lm-eval" else version(name))
