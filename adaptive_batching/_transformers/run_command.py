"""``run -- <command>``: any command that trains with ``Trainer``, with adaptive batching. It imports no torch."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from adaptive_batching._transformers.arguments import AdaptiveArguments
from adaptive_batching._values import ConfigError

SETTINGS = "ADAPTIVE_BATCHING_SETTINGS"
"""Variable of the environment that has the settings, as JSON."""

_TEXT = (
    "Run a command that trains with Hugging Face's Trainer, or a subclass of it, with adaptive batching: every trainer "
    "of its processes is made adaptive. One that cannot be trains unchanged, and a warning says why."
)
_EXAMPLES = """examples:
  {prog} -- llamafactory-cli train train.yaml
  {prog} --settings micro_batch_size=auto,memory_limit=40GiB -- torchrun --nproc_per_node 2 train.py"""


def add_run_command(subparsers: Any, prog: str) -> None:
    """Add ``run`` of a command."""
    parser = subparsers.add_parser(
        "run", prog=f"{prog} run", help=_TEXT.split(":")[0] + ".", description=_TEXT,
        usage="%(prog)s [--settings NAME=VALUE,...] -- COMMAND", epilog=_EXAMPLES.format(prog=f"{prog} run"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "--settings", default="auto", metavar="NAME=VALUE,...",
        help="as in AdaptiveArguments, or as JSON; default: auto, which is micro_batch_size=auto",
    )  # fmt: skip
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="with its arguments")

    def run(args: argparse.Namespace) -> None:
        command = args.command[1:] if args.command[:1] == ["--"] else args.command
        if not command:
            raise ConfigError("the command is missing: write it after --, as in run -- python train.py")
        try:
            settings = parsed(args.settings)
            is_enabled = AdaptiveArguments.of(settings).settings(batch_size=1).enabled
        except (ConfigError, TypeError) as error:
            raise ConfigError(f"--settings {args.settings}: {error}") from None
        if not is_enabled:
            raise ConfigError(f"--settings {args.settings} changes nothing; write micro_batch_size=auto, for one")
        os.environ[SETTINGS] = json.dumps(settings)
        paths = [str(Path(__file__).with_name("site")), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        try:
            os.execvp(command[0], command)
        except OSError as error:
            raise ConfigError(f"{command[0]}: {error.strerror}") from None

    parser.set_defaults(func=run)


def parsed(text: str) -> dict[str, Any] | str:
    """Return settings written as ``name=value,name=value``, as JSON, or as ``auto``.

    Raises:
        ConfigError: If a part has no name.
    """
    if text == "auto":
        return text
    if text.lstrip().startswith("{"):
        try:
            return dict(json.loads(text))
        except ValueError as error:
            raise ConfigError(f"this is no JSON ({error})") from None
    settings = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"{part!r} has no value; write name=value,name=value, or JSON if a value has a comma")
        settings[name.strip()] = _value(value.strip())
    return settings


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
