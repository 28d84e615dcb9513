"""The command line: ``adaptive-batching`` or ``python -m adaptive_batching``."""

from __future__ import annotations

import argparse
import sys
import webbrowser
from pathlib import Path
from typing import Any

import adaptive_batching
from adaptive_batching._report.events import RecordError, newest_record
from adaptive_batching._report.page import PAGE, write_page

PROG = "adaptive-batching"


def add_torchtune(subparsers: Any, prog: str) -> None:
    """Add the commands that need torchtune, which takes seconds to import."""
    try:
        from adaptive_batching._torchtune.commands import add_commands, add_quickstart
        from adaptive_batching._torchtune.plan_command import add_plan
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"{prog} is for torchtune recipes, and {error.name} is not installed; "
            f"pip install 'adaptive-batching[torchtune]'"
        ) from None
    except ImportError as error:  # a name that another version has not
        raise SystemExit(f"{prog} needs other versions ({error}); pip install 'adaptive-batching[torchtune]'") from None
    for add in (add_quickstart, add_plan, add_commands):
        add(subparsers, prog)


def add_report(subparsers: Any, prog: str) -> None:
    """Add ``report``, which makes the page of a run again, or one of several. It knows nothing of torchtune."""
    text = "Make the page of a run from its record, whether it has ended or not, or lay several runs side by side."
    parser = subparsers.add_parser("report", prog=f"{prog} report", help=text, description=text)
    parser.add_argument(
        "output_dir", nargs="*", type=Path,
        help="of a run; or the folder of its record, or the record; default: the newest run below this folder",
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
        except RecordError as error:
            parser.error(str(error))
        except OSError as error:
            parser.error(f"{error.filename or output}: {error.strerror or error}; name another file with --output")
        if args.open and not webbrowser.open(page.resolve().as_uri()):
            parser.error(f"--open found no browser; open {page} in one")

    parser.set_defaults(func=report)


COMMANDS = [add_torchtune, add_report]
"""Functions that take (subparsers, program name) and add one or more commands, each with its ``func``."""


def main() -> None:
    """Run the command that the command line names."""
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="torchtune fine-tuning with the largest batch that fits: recipes, configs, and their runs.",
    )
    parser.add_argument("--version", action="version", version=f"{PROG} {adaptive_batching.__version__}")
    parser.set_defaults(func=lambda args: parser.print_help())
    subparsers = parser.add_subparsers(title="commands")
    for add in [add_report] if sys.argv[1:2] == ["report"] else COMMANDS:
        add(subparsers, PROG)
    args, rest = parser.parse_known_args()
    if rest:  # argparse takes positional arguments from between two options, and leaves those after the second
        if not hasattr(args, "overrides") or any(argument.startswith("-") for argument in rest):
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        args.overrides = [*args.overrides, *rest]
    args.func(args)


if __name__ == "__main__":
    main()
