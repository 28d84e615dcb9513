"""Recipes and configs by name, read without importing torchtune, which takes seconds.

torchtune finds recipes and configs through a registry, by paths relative to its own. Ours are in it by absolute paths,
each with the configs of this package and those of the stock recipe of the same name.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import re
import runpy
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import adaptive_batching

_PACKAGE = Path(adaptive_batching.__file__).parent
LAUNCHED = r"(?m)^#.*?(\w+)(?:\.py)? --config "
"""Pattern of the recipe that a config says it is launched with, in a comment."""

NOT_INSTALLED = "is not installed; pip install 'adaptive-batching[torchtune]'"


def recipes_folder() -> Path:
    """Return the folder of our recipes: inside an installed package, next to it in a checkout."""
    installed = _PACKAGE / "recipes"
    return installed if (installed / "configs").is_dir() else _PACKAGE.parent / "recipes"


@functools.cache
def recipes() -> tuple[Any, ...]:
    """Return our recipes as torchtune's registry writes them: objects with name, file_path, configs and the like.

    Raises:
        SystemExit: If torchtune is not installed.
    """
    spec = find_spec("torchtune")
    if spec is None or spec.origin is None:
        raise SystemExit(f"error: torchtune, whose recipes and configs this is about, {NOT_INSTALLED}")
    stock = Path(spec.origin).parent
    registry = runpy.run_path(str(stock / "_recipe_registry.py"))
    folder, found = recipes_folder(), []
    ours = sorted((folder / "configs").rglob("*.yaml"), key=lambda path: (path.parent.name != "quickstart", path))
    launched = {path: re.findall(LAUNCHED, path.read_text()) for path in ours}
    for recipe in sorted(registry["_ALL_RECIPES"], key=lambda recipe: str(recipe.name)):
        path = folder / f"{recipe.name}.py"
        if path.is_file():
            configs = [
                registry["Config"](str(config.relative_to(folder / "configs").with_suffix("")), str(config))
                for config in ours
                if recipe.name in launched[config]
            ]
            for config in recipe.configs:
                config.file_path = str(stock.parent / "recipes" / "configs" / config.file_path)
            found.append(
                registry["Recipe"](recipe.name, str(path), configs + recipe.configs, recipe.supports_distributed)
            )
    return tuple(found)


def register() -> None:
    """Have torchtune's own commands, in this process, find our recipes in the place of its own."""
    from torchtune import _recipe_registry as registry

    registry._ALL_RECIPES[:] = recipes()


def config_files() -> dict[str, Path]:
    """Return the file of each config that has a name."""
    return {config.name: Path(config.file_path) for recipe in recipes() for config in recipe.configs}


def find_config(name: str, parser: argparse.ArgumentParser) -> Path:
    """Return the file of the config that a name or a path stands for; without one, end with the closest name."""
    files, path = config_files(), Path(name)
    if path.is_file():
        return path
    if name not in files:
        if name in [recipe.name for recipe in recipes()]:
            parser.error(f"{name!r} is a recipe, and a config is needed; 'ls --recipe {name}' lists its configs")
        parser.error(f"there is no config {name!r}{closest(name, files)}")
    return files[name]


def find_recipe(name: str, parser: argparse.ArgumentParser) -> Any:
    """Return the recipe of that name; without one, end with the closest name."""
    named = {recipe.name: recipe for recipe in recipes()}
    if name not in named:
        parser.error(f"there is no recipe {name!r}{closest(name, named)}")
    return named[name]


def recipe_of(name: str, path: Path) -> str | None:
    """Return the recipe that a config is for: the one that lists it, or else the first that its comments launch."""
    listed = [recipe.name for recipe in recipes() if name in [config.name for config in recipe.configs]]
    known = {recipe.name for recipe in recipes()}
    return next((each for each in [*listed, *re.findall(LAUNCHED, path.read_text())] if each in known), None)


def closest(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about a name that is not known."""
    match = difflib.get_close_matches(name, [*known], n=1)
    return f"; did you mean {match[0]!r}?" if match else "; 'ls' lists them"
