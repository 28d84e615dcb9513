"""torchtune's commands (``ls``, ``cp``, ``cat``, ``validate``, ``run``) over the recipes and configs of this package.

torchtune finds recipes and configs through a registry, by paths relative to its own. Ours are in it by absolute paths,
each with the configs of this package and those of the stock recipe of the same name.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from torchtune import _recipe_registry as registry
from torchtune._cli.cat import Cat
from torchtune._cli.cp import Copy
from torchtune._cli.ls import List
from torchtune._cli.run import Run
from torchtune._cli.validate import Validate
from torchtune.config._errors import InstantiationError

import adaptive_batching
from adaptive_batching._torchtune import quickstart
from adaptive_batching._torchtune.planning import CONFIGS
from adaptive_batching._values import first_line

_PACKAGE = Path(adaptive_batching.__file__).parent
# A run of a minute on two cores. The probe is told of samples half as long as the longest, so that the first full batch
# runs out of memory, and is recovered.
_SHORT = [
    *("dataset.split=train[:384]", "lr_scheduler.num_warmup_steps=10"),
    *("adaptive_batching.memory_limit=1.5GiB", "adaptive_batching.sequence_length=128"),
]
LAUNCHED = r"(?m)^#.*?(\w+)(?:\.py)? --config "
"""Pattern of the recipe that a config says it is launched with, in a comment."""


def recipes_folder() -> Path:
    """Return the folder of our recipes: inside an installed package, next to it in a checkout."""
    installed = _PACKAGE / "recipes"
    return installed if installed.is_dir() else _PACKAGE.parent / "recipes"


def add_commands(subparsers: Any, prog: str) -> None:
    """Add torchtune's commands to ``subparsers`` of argparse; help and errors call the command line ``prog``."""
    registry._ALL_RECIPES[:] = _ours()
    for command in (List, Copy, Cat, _Validate, _Run):
        parser = command.create(subparsers)._parser
        for part in (parser, *parser._actions, *subparsers._choices_actions):  # all texts that tell what to type
            for name, text in vars(part).items():
                if name in ("prog", "usage", "epilog", "description", "help") and isinstance(text, str):
                    setattr(part, name, re.sub(r"\btune (?=[a-z]+)", f"{prog} ", text))


def add_quickstart(subparsers: Any, prog: str) -> None:
    text = "Make real data, a tokenizer and a small model, then probe, grow and train on the CPU. No download."
    parser = subparsers.add_parser("quickstart", prog=f"{prog} quickstart", help=text, description=text)
    parser.add_argument("--data_dir", type=Path, default=Path("data/quickstart"), help="default: %(default)s")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the config")

    def run(args: argparse.Namespace) -> None:
        folder = recipes_folder()
        try:
            quickstart.build(args.data_dir)
        except FileExistsError as error:
            parser.error(str(error))
        overrides = [f"data_dir={args.data_dir}", *_SHORT, *args.overrides]
        command = f"{prog} run full_finetune_single_device --config quickstart/full_single_device"
        print(f"Running this command:\n  {command} \\\n    {' '.join(overrides)}\n", flush=True)
        sys.argv = [parser.prog, "--config", f"{folder}/configs/quickstart/full_single_device.yaml", *overrides]
        try:
            runpy.run_path(str(folder / "full_finetune_single_device.py"), run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
        print(
            f"\nNext, with a config of your own, or one of torchtune's ('{prog} ls'):\n"
            f"  {prog} run lora_finetune_single_device --config llama3_2/1B_lora_single_device "
            f"use_maximum_batch_size=True"
        )

    parser.set_defaults(func=run)


def _ours() -> list[Any]:
    folder, found = recipes_folder(), []
    ours = sorted((folder / "configs").rglob("*.yaml"), key=lambda path: (path.parent.name != "quickstart", path))
    for stock in sorted(registry.get_all_recipes(), key=lambda recipe: recipe.name):
        path = folder / f"{stock.name}.py"
        if path.is_file():
            configs = [
                registry.Config(name=str(config.relative_to(folder / "configs").with_suffix("")), file_path=str(config))
                for config in ours
                if stock.name in re.findall(LAUNCHED, config.read_text())
            ]
            configs += stock.configs
            found.append(registry.Recipe(stock.name, str(path), configs, stock.supports_distributed))
    return found


def _config_files() -> dict[str, Path]:
    return {each.name: CONFIGS / each.file_path for recipe in registry.get_all_recipes() for each in recipe.configs}


class _Run(Run):
    """Looks at what is named before; torchtune would end in a traceback."""

    def _run_cmd(self, args: argparse.Namespace) -> None:
        known = [recipe.name for recipe in registry.get_all_recipes()]
        name = Path(args.recipe).stem if args.recipe.startswith("adaptive_batching/recipes/") else args.recipe
        args.recipe = name if name in known else args.recipe
        if args.recipe not in known and not Path(args.recipe).is_file():
            self._parser.error(f"there is no recipe {args.recipe!r}{closest(args.recipe, known)}")
        if "--config" not in args.recipe_args[:-1]:
            self._parser.error("--config <name or path> is missing after the recipe")
        config = args.recipe_args[args.recipe_args.index("--config") + 1]
        if config not in _config_files() and not Path(config).is_file():
            self._parser.error(f"there is no config {config!r}{closest(config, [*_config_files()])}")
        # Processes that torchrun starts find this package, and modules in the working directory, on the path.
        paths = [str(_PACKAGE.parent), str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        sys.argv[0] = self._parser.prog
        super()._run_cmd(args)


class _Validate(Validate):
    """Takes names as well as paths, and looks at what is named before; torchtune takes a path that can be read."""

    def _validate_cmd(self, args: argparse.Namespace) -> None:
        name, files = str(args.config), _config_files()
        if not args.config.is_file() and name not in files:
            self._parser.error(f"there is no config {name!r}{closest(name, [*files])}")
        path = args.config = args.config if args.config.is_file() else files[name]
        try:
            is_mapping = OmegaConf.is_dict(OmegaConf.load(path))
        except Exception as error:  # whatever is wrong with it
            self._parser.error(f"{path} cannot be read: {first_line(error).strip()}")
        if not is_mapping:
            self._parser.error(f"{path} is no mapping of keys to values, as a config is")
        try:
            super()._validate_cmd(args)
        except InstantiationError as error:  # a component that is not there
            self._parser.error(f"{path}: {' '.join(str(error).split())}")


def closest(name: str, known: list[str]) -> str:
    """Return the end of a message about a name that is not known."""
    match = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {match[0]!r}?" if match else "; 'ls' lists them"
