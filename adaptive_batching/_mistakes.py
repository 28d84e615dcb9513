"""Mistakes on a command line: each is one exception, and ends the process in one line that one function prints."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from adaptive_batching._values import ConfigError


class Mistake(SystemExit):
    """Ends a process that has printed why; ``code`` is 2 for a mistake of its user, as argparse has it, and else 1."""

    def __init__(self, line: str, code: int) -> None:
        super().__init__(line)
        self.code = code


def end(why: str, code: int = 2) -> NoReturn:
    """Print in one line why this process ends, and end it."""
    print(f"error: {why}", file=sys.stderr)
    raise Mistake(f"error: {why}", code) from None


class Parser(argparse.ArgumentParser):
    """Raises what argparse would print after its usage; parsers of subcommands are of this class, too."""

    def error(self, message: str) -> NoReturn:
        """Raise a mistake on the command line as a :class:`ConfigError` that says where help is."""
        what = " ".join(message.split()).rstrip(".")
        raise ConfigError(f"{what}{' See' if what.endswith('?') else '; see'} '{self.prog} --help'")
