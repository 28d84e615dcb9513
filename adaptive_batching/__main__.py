"""The command line: ``adaptive-batching`` or ``python -m adaptive_batching``.

A command imports what it needs when it is named: torch and torchtune take seconds.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
import webbrowser
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import adaptive_batching
from adaptive_batching._config import as_overrides
from adaptive_batching._dry_run.command import add_dry_run
from adaptive_batching._environment import add_env
from adaptive_batching._mistakes import Parser, end
from adaptive_batching._padding import add_padding
from adaptive_batching._report.events import newest_record
from adaptive_batching._report.page import PAGE, write_page
from adaptive_batching._torchtune.names import NOT_INSTALLED, command_of_recipe, register
from adaptive_batching._transformers.run_command import add_run_command
from adaptive_batching._values import AdaptiveBatchingError, ConfigError, install_extra

PROG = "adaptive-batching"
_NO_PROGRESS_BARS = {"TQDM_DISABLE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}  # read when tqdm is imported
OF_TORCHTUNE = {
    "plan": ("cli.plan", "Find the largest batch of a torchtune config that fits a GPU, and its time, without a GPU."),
    "quickstart": ("cli.commands", "Make a small model and data, and fine-tune on the CPU: a first look."),
    "probe": ("cli.commands", "Find the largest batch of a config on this machine, and stop before training."),
    "run": ("cli.commands", "Run a torchtune recipe, as 'tune run' does, or with run -- COMMAND any Trainer script."),
    "validate": ("cli.commands", "Check a config and its overrides, without loading a model."),
}
"""Command -> the module of ``_torchtune`` whose ``add_<command>`` adds it, and what the list of commands says."""


def _of_torchtune(name: str) -> Callable[[Any, str], None]:
    """Return what adds a command that needs torchtune."""

    def add(subparsers: Any, prog: str) -> None:
        try:
            module = importlib.import_module(f"adaptive_batching._torchtune.{OF_TORCHTUNE[name][0]}")
            if name != "plan":  # which reads their names alone
                register()
        except ModuleNotFoundError as error:
            raise ConfigError(f"{name} needs torchtune's recipes, but {error.name} {NOT_INSTALLED}") from None
        except ImportError as error:  # a name that another version has not
            raise ConfigError(
                f"{name} needs other versions of its dependencies ({error}); {install_extra('torchtune')}"
            ) from None
        getattr(module, f"add_{name}")(subparsers, prog)

    return add


def add_report(subparsers: Any, prog: str) -> None:
    """Add ``report``, which makes the page of a run again, or one of several. It knows nothing of torchtune."""
    text = "Make the page of a run from its record, even while it trains, or compare several runs on one page."
    parser = subparsers.add_parser("report", prog=f"{prog} report", help=text, description=text)
    parser.add_argument(
        "output_dir", nargs="*", type=Path,
        help="a run's output_dir, its record, or the record's folder; default: the newest run below this folder",
    )  # fmt: skip
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    parser.add_argument(
        "--output", type=Path, metavar="FILE",
        help=f"default: {PAGE} next to the record of a run, and in this folder for several",
    )  # fmt: skip

    def report(args: argparse.Namespace) -> None:
        output = args.output or (Path(PAGE) if len(args.output_dir) > 1 else None)
        try:
            page = write_page(args.output_dir or [newest_record(Path())], output)
            print(page)
        except OSError as error:
            raise ConfigError(
                f"{error.filename or output}: {error.strerror or error}; name another file with --output"
            ) from None
        if args.open and not webbrowser.open(page.resolve().as_uri()):
            raise ConfigError(f"--open found no browser; open {page} yourself")

    parser.set_defaults(func=report)


COMMANDS: dict[str, Callable[[Any, str], None]] = {
    "dry-run": partial(add_dry_run, command_of_recipe=command_of_recipe),
    **{name: _of_torchtune(name) for name in OF_TORCHTUNE},
    "report": add_report,
    "padding": add_padding,
    "env": add_env,
}
"""Name -> function of (subparsers, program name) that adds the command, with its ``func``."""


def _with_dashes(arguments: Sequence[str], options: Collection[str]) -> list[str]:
    """Return ``arguments`` with options as they are known, be they written with hyphens or underscores."""
    known = {option.replace("_", "-"): option for option in options if option.startswith("--")}
    own = list(arguments[: arguments.index("--")] if "--" in arguments else arguments)
    for index, argument in enumerate(own):
        name, *value = argument.split("=", 1)
        if name not in options and (option := known.get(name.replace("_", "-"))):
            own[index] = "=".join([option, *value])
    return [*own, *arguments[len(own) :]]


def _runs_a_command(arguments: Sequence[str]) -> bool:
    """Return True if ``run`` is to run any command, rather than a recipe, which no ``--`` comes before."""
    if "--" in arguments or any(argument.partition("=")[0] == "--settings" for argument in arguments):
        return True
    return arguments[1:] in (["-h"], ["--help"]) and importlib.util.find_spec("torchtune") is None


def _remedy(rest: Sequence[str], options: Collection[str]) -> str:
    """Say what arguments that are not known were to be: settings of a config, or options with another name."""
    if meant := as_overrides(rest):
        return f"; a setting of a config has no dashes: write {' '.join(meant)}"
    return _near(next((argument.partition("=")[0] for argument in rest if argument.startswith("--")), ""), options)


def _near(name: str, known: Collection[str]) -> str:
    """Return the end of a message about a name that is not known."""
    match = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {match[0]!r}?" if match else ""


def main() -> None:
    """Run the command that the command line names; a mistake ends in one line."""
    try:
        _run(sys.argv[1:])
    except AdaptiveBatchingError as error:
        end(str(error))


def _run(arguments: list[str]) -> None:
    parser = Parser(
        prog=PROG,
        description="Fine-tuning in the memory that you have. See whether a script (Trainer, TRL, torchrun, any other) "
        "or a torchtune config fits a GPU, run torchtune's recipes without padding, read what a run did. In Python: "
        "adaptive_batching.transformers for Trainer and TRL, AdaptiveStep for your own loop.",
    )
    parser.add_argument("--version", action="version", version=f"{PROG} {adaptive_batching.__version__}")
    parser.set_defaults(func=lambda args: parser.print_help())
    subparsers = parser.add_subparsers(title="commands", metavar="command")
    named = next((argument for argument in arguments if not argument.startswith("-")), None)
    if named in ("run", "probe") and "-q" in arguments:
        os.environ.update(_NO_PROGRESS_BARS)
    if named is not None and named.replace("_", "-") in COMMANDS:
        arguments[arguments.index(named)] = named = named.replace("_", "-")
    elif named is not None:
        parser.error(f"there is no command {named!r}{_near(named, COMMANDS)}")
    commands = {**COMMANDS, "run": add_run_command} if named == "run" and _runs_a_command(arguments) else COMMANDS
    for name, add in commands.items():
        if name in OF_TORCHTUNE and name != named:
            subparsers.add_parser(name, help=OF_TORCHTUNE[name][1])
        else:
            add(subparsers, PROG)
    of_command = subparsers.choices[named] if named else parser
    options = of_command._option_string_actions
    args, rest = parser.parse_known_args(_with_dashes(arguments, options))
    if rest:  # argparse takes positional arguments from between two options, and leaves those after the second
        if not hasattr(args, "overrides") or any(argument.startswith("-") for argument in rest):
            of_command.error(f"unrecognized arguments: {' '.join(rest)}{_remedy(rest, options)}")
        args.overrides = [*args.overrides, *rest]
    args.func(args)


if __name__ == "__main__":
    main()
