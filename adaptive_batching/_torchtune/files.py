"""``ls``, ``cat`` and ``cp``: recipes and configs as they lie on the disk, without importing torchtune."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from adaptive_batching._torchtune.names import closest, config_files, find_config, find_recipe, recipes, recipes_folder


def add_ls(subparsers: Any, prog: str) -> None:
    """Add ``ls``, which lists recipes, each with its configs."""
    text = "List recipes, each with the configs that work with it."
    parser = subparsers.add_parser("ls", prog=f"{prog} ls", help=text, description=text)
    parser.add_argument("--recipe", metavar="NAME", help="list the configs of this recipe alone")
    parser.add_argument("--adaptive", action="store_true", help="list the configs of this package alone")
    parser.add_argument("--json", action="store_true", help="print a JSON object: recipe -> its configs")

    def ls(args: argparse.Namespace) -> None:
        shown = recipes() if args.recipe is None else [find_recipe(args.recipe, parser)]
        ours = str(recipes_folder())
        rows = {
            recipe.name: [
                config.name for config in recipe.configs if not args.adaptive or config.file_path.startswith(ours)
            ]
            for recipe in shown
        }
        if args.json:
            print(json.dumps(rows, indent=1))
            return
        print(f"{'RECIPE':<40} CONFIG")
        for recipe, configs in rows.items():
            for number, config in enumerate(configs or ["<>"]):
                print(f"{'' if number else recipe:<40} {config}")

    parser.set_defaults(func=ls)


def add_cat(subparsers: Any, prog: str) -> None:
    """Add ``cat``, which prints a config as it is written."""
    text = "Print a config with its comments, to see what you can override."
    parser = subparsers.add_parser("cat", prog=f"{prog} cat", help=text, description=text)
    parser.add_argument("config", help="name, as 'ls' shows it, or path")
    parser.add_argument("--sort", action="store_true", help="sort the keys, which leaves out the comments")

    def cat(args: argparse.Namespace) -> None:
        written = find_config(args.config, parser).read_text(encoding="utf-8")
        if args.sort:
            import yaml  # type: ignore[import-untyped]

            written = yaml.dump(yaml.safe_load(written), default_flow_style=False, allow_unicode=True)
        print(written, end="")

    parser.set_defaults(func=cat)


def add_cp(subparsers: Any, prog: str) -> None:
    """Add ``cp``, which copies a recipe or a config."""
    text = "Copy a recipe or a config to a path of yours, to change it."
    parser = subparsers.add_parser("cp", prog=f"{prog} cp", help=text, description=text)
    parser.add_argument("name", help="of a recipe or a config, as 'ls' shows it")
    parser.add_argument("destination", type=Path, help="file or folder")
    parser.add_argument("-n", "--no-clobber", action="store_true", help="leave a file that is there as it is")
    parser.add_argument("--make-parents", action="store_true", help="make the folders of the destination")

    def cp(args: argparse.Namespace) -> None:
        known = {recipe.name: Path(recipe.file_path) for recipe in recipes()} | config_files()
        if args.name not in known:
            parser.error(f"there is no recipe or config {args.name!r}{closest(args.name, known)}")
        source, to = known[args.name], args.destination
        to = to / source.name if to.is_dir() else to if to.suffix == source.suffix else to.with_suffix(source.suffix)
        if args.no_clobber and to.exists():
            print(f"{to} is there, and is left as it is")
            return
        try:
            if args.make_parents:
                to.parent.mkdir(parents=True, exist_ok=True)
            print(f"Copied file to {shutil.copyfile(source, to)}")
        except FileNotFoundError:
            parser.error(f"there is no folder {str(to.parent)!r}; make it, or add --make-parents")
        except OSError as error:
            parser.error(f"{to}: {error.strerror or error}; name another destination")

    parser.set_defaults(func=cp)
