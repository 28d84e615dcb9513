"""Recipes and configs by name, read without importing torchtune, which takes seconds.

torchtune finds recipes and configs through a registry, by paths relative to its own. Ours are in it by absolute paths,
each with the configs of this package and those of the stock recipe of the same name.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
import runpy
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import adaptive_batching
from adaptive_batching._values import ConfigError, first_line, install_extra

_PACKAGE = Path(adaptive_batching.__file__).parent
LAUNCHED = r"(?m)^#.*?(\w+)(?:\.py)? --config "
"""Pattern of the recipe that a config says it is launched with, in a comment."""

PLANNED = (
    "full_finetune_single_device", "full_finetune_distributed", "lora_finetune_single_device",
    "lora_finetune_distributed", "lora_dpo_single_device", "lora_dpo_distributed", "full_dpo_distributed",
    "knowledge_distillation_single_device", "knowledge_distillation_distributed", "qat_distributed",
    "qat_lora_finetune_distributed",
)  # fmt: skip
"""Recipes whose batches are samples of given data, and that can be planned."""

REPORTED = "samples.json"
"""File in the folder of a dry run of a recipe that says how long its samples are, and how many there are if known."""

NOT_INSTALLED = f"is not installed; {install_extra('torchtune')}"


def recipes_folder() -> Path:
    """Return the folder of our recipes: inside an installed package, next to it in a checkout."""
    installed = _PACKAGE / "recipes"
    return installed if (installed / "configs").is_dir() else _PACKAGE.parent / "recipes"


@functools.cache
def recipes() -> tuple[Any, ...]:
    """Return our recipes as torchtune's registry writes them: objects with name, file_path, configs and the like.

    Raises:
        ConfigError: Without torchtune.
    """
    spec = find_spec("torchtune")
    if spec is None or spec.origin is None:
        raise ConfigError(f"torchtune, which has the recipes and configs, {NOT_INSTALLED}")
    stock = Path(spec.origin).parent
    registry = runpy.run_path(str(stock / "_recipe_registry.py"))
    folder, listed = recipes_folder(), []
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
            listed.append(
                registry["Recipe"](recipe.name, str(path), configs + recipe.configs, recipe.supports_distributed)
            )
    return tuple(listed)


def register() -> None:
    """Have torchtune's own commands, in this process, find our recipes in the place of its own."""
    from torchtune import _recipe_registry as registry

    registry._ALL_RECIPES[:] = recipes()


def config_files() -> dict[str, Path]:
    """Return the file of each config that has a name."""
    return {config.name: Path(config.file_path) for recipe in recipes() for config in recipe.configs}


def config_on_command_line() -> str:
    """Return what ``--config`` names on the command line of this process; empty if it is not there."""
    words = [part for argument in sys.argv for part in argument.split("=", argument.startswith("--config="))]
    return next((after for name, after in pairwise(words) if name == "--config"), "")


def find_config(name: str) -> Path:
    """Return the file of the config that a name or a path stands for; ConfigError with the closest name without one."""
    files, path = config_files(), Path(name)
    if path.is_file():
        return path
    if name not in files:
        if name in [recipe.name for recipe in recipes()]:
            raise ConfigError(f"{name!r} is a recipe, not a config; 'tune ls' lists its configs")
        what = (
            f"the file {name!r} does not exist" if path.suffix in (".yaml", ".yml") else f"there is no config {name!r}"
        )
        raise ConfigError(f"{what}{closest(name, files)}")
    return files[name]


def find_recipe(name: str) -> Any:
    """Return the recipe of that name; ConfigError with the closest name without one."""
    named = {recipe.name: recipe for recipe in recipes()}
    if name in config_files():
        listing = [recipe.name for recipe in recipes() if name in [config.name for config in recipe.configs]]
        raise ConfigError(f"{name!r} is a config, not a recipe; run it with {' or '.join(listing)}")
    if name not in named:
        what = f"the file {name!r} does not exist" if name.endswith(".py") else f"there is no recipe {name!r}"
        raise ConfigError(f"{what}{closest(name, named)}")
    return named[name]


def recipe_of(name: str, path: Path) -> str | None:
    """Return the recipe that a config is for: the one that lists it, or else the first that its comments launch."""
    listed = [recipe.name for recipe in recipes() if name in [config.name for config in recipe.configs]]
    names = {recipe.name for recipe in recipes()}
    return next(
        (name for name in [*listed, *re.findall(LAUNCHED, path.read_text(errors="replace"))] if name in names), None
    )


def why_not_read(error: Exception) -> str:
    """Return in one line why a config cannot be read, with the line that YAML stumbles over."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return first_line(error).strip()
    return f"{getattr(error, 'problem', '') or 'not YAML'}, in line {mark.line + 1}"


def closest(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about a name that is not known."""
    match = difflib.get_close_matches(name, [*known], n=1)
    return f"; did you mean {match[0]!r}?" if match else "; 'tune ls' lists torchtune's"


def command_of_recipe(command: Sequence[str], folder: Path, devices: int, length: int | None, **more: int) -> list[str]:
    """Return the command of a dry run of a recipe, which trains on stand-ins that it writes to ``folder``.

    Args:
        command: The recipe and its arguments, as after ``run``.
        folder: For all that is written.
        devices: To train on.
        length: Tokens of each sample; None for what the config says.
        more: Further arguments of ``_torchtune.cli.dry_run.main``.

    Raises:
        ConfigError: If there is no such recipe or config, or if the recipe trains on another number of devices.
    """
    name, names = Path(command[0]).stem, [recipe.name for recipe in recipes()]
    if name not in names:
        is_script = Path(command[0]).suffix == ".py" and Path(command[0]).is_file()
        remedy = f"; to run a script, write -- python {command[0]}" if is_script else closest(name, names)
        raise ConfigError(f"{command[0]!r} is neither a program nor a recipe{remedy}")
    if "--config" not in command[:-1]:
        raise ConfigError(f"--config <name or path> is missing after {name}")
    at = list(command).index("--config")
    config, overrides = command[at + 1], [*command[1:at], *command[at + 2 :]]
    if config not in config_files() and not Path(config).is_file():
        raise ConfigError(f"there is no config {config!r}{closest(config, config_files())}")
    if wrong := [override for override in overrides if "=" not in override and not override.startswith("~")]:
        raise ConfigError(f"{wrong[0]!r} is not an override; write key=value")
    if name.endswith("single_device") and devices > 1:
        raise ConfigError(f"--devices {devices}: {name} trains on one device; name another recipe")
    if name.endswith("distributed") and devices == 1:
        raise ConfigError(f"--devices 1: {name} trains on 2 or more; set --devices 2")
    given = {
        "recipe": name, "config": config, "overrides": overrides,
        "folder": str(folder), "devices": devices, "length": length, **more,
    }  # fmt: skip
    return [sys.executable, "-m", "adaptive_batching._torchtune.cli.dry_run", json.dumps(given)]
