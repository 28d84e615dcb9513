"""The values that settings are made of: parsed once, typed from then on. Standard library only."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

DRY_RUN = "ADAPTIVE_BATCHING_DRY_RUN"
"""Variable of the environment that a process of a dry run has. Its values are all zero."""

_BYTES_PER_UNIT = {
    "": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30,
    "KB": 10**3, "MB": 10**6, "GB": 10**9,
}  # fmt: skip
_GIB_BELOW = 4096  # numbers without a unit: no device has so many GiB, and none can train in so few bytes

_SECRET = re.compile("key|token|secret|passw|passphrase|credential", re.IGNORECASE)
_NO_SECRET = re.compile(
    r"tokeni[sz]\w*|keyword\w*|(num|max|min|average|total|input|output|new)\w*tokens\w*|"
    r"(pad|eos|bos|unk|sep|cls|mask|stop|start|end|image|audio|video|special|extra)_tokens?",
    re.IGNORECASE,
)
_ASSIGNED = re.compile(r"([\w.-]+)=([^\s'\"]+)")
# As of Hugging Face, OpenAI, GitHub, GitLab, Slack and AWS; and a password in an address
_TOKEN = re.compile(
    r"((?<![A-Za-z])(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[a-z]-|AKIA)[\w-]{8,})|(?<=://)[^/\s:@]*:([^/\s@]+)(?=@)"
)
_SPECIAL_TOKEN = re.compile(r"<.*>|\[[A-Z]+\]|")  # such as <|im_end|> or [PAD], or nothing


class AdaptiveBatchingError(Exception):
    """What this package raises for its user: the message says what is wrong, and what to do."""


class ConfigError(AdaptiveBatchingError, ValueError):
    """A setting or an argument that cannot be used. The message names key, value and remedy."""


@dataclass(frozen=True)
class MemoryAmount:
    """An amount of memory: a number of bytes, or a fraction of what a device has."""

    num_bytes: int | None = None
    fraction: float | None = None
    written: str = field(default="", compare=False)
    """As the user has it, for messages."""

    @classmethod
    def parse(cls, key: str, value: Any) -> MemoryAmount:
        """Read ``"40GiB"``, ``"40G"``, ``"512 MB"``, ``40``, ``1073741824``, ``1e9``, ``0.9``, ``"0.9"`` or ``"90%"``.

        A number without a unit is GiB below 4096, as for a card, and bytes from there on; with a decimal point and at
        most 1, it is a fraction of the device.
        """
        if isinstance(value, MemoryAmount):
            return value
        remedy = f"{key}={value!r} is not a memory size; write 24GiB, 90% or bytes"
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ConfigError(remedy)
        match = re.fullmatch(r"\s*((?:\d+(?:\.\d*)?|\.\d+)(?:[eE]\+?\d+)?)\s*([A-Za-z]*|%)\s*", str(value))
        number, unit = match.groups() if match else ("", "")
        unit = unit.upper()
        if not number or (unit not in _BYTES_PER_UNIT and unit != "%"):
            raise ConfigError(remedy)
        is_fraction = unit == "%" or (not unit and not number.isdigit() and float(number) <= 1)
        if not unit and not is_fraction and float(number) < _GIB_BELOW:
            unit = "GIB"
        if is_fraction:
            fraction = float(number) / (100 if unit == "%" else 1)
            if fraction > 1:
                raise ConfigError(f"{key}={value!r} is more than the whole device; {remedy.split('; ', 1)[1]}")
            return cls(fraction=fraction, written=str(value))
        return cls(num_bytes=int(float(number) * _BYTES_PER_UNIT[unit]), written=str(value))

    def __str__(self) -> str:
        if self.written:
            return self.written
        return memory_size(self.num_bytes or 0) if self.fraction is None else f"{100 * self.fraction:g}%"

    def bytes_of(self, total_bytes: int) -> int:
        return self.num_bytes if self.num_bytes is not None else int(total_bytes * (self.fraction or 0.0))


@dataclass(frozen=True)
class Whole:
    """Run a batch in one forward, as in stock."""

    def __str__(self) -> str:
        return "null"


@dataclass(frozen=True)
class Fixed:
    """Run a batch in forwards of ``samples`` samples."""

    samples: int

    def __str__(self) -> str:
        return str(self.samples)


@dataclass(frozen=True)
class ByLength:
    """Sort the samples of an optimizer step by length, and split them by tokens."""

    def __str__(self) -> str:
        return "auto"


@dataclass(frozen=True)
class Explore:
    """Measure before training which of the other ways is the fastest."""

    def __str__(self) -> str:
        return "explore"


SplitSize = Whole | Fixed | ByLength
"""How a step can be split; ``str()`` gives the spelling of a config."""

MicroBatchSize = SplitSize | Explore
"""Ways of running a batch that a config can ask for."""


def parse_micro_batch_size(value: Any) -> MicroBatchSize:
    """Read ``None``, a whole number of at least 1, ``"auto"`` or ``"explore"``; ConfigError if it is none of these."""
    if isinstance(value, (Whole, Fixed, ByLength, Explore)):
        return value
    if value is None:
        return Whole()
    if value in ("auto", "explore"):
        return ByLength() if value == "auto" else Explore()
    if isinstance(value, str):
        raise ConfigError(f"micro_batch_size={value!r} must be a whole number, auto, explore or null")
    require_positive_int("micro_batch_size", value)
    return Fixed(value)


def require_bool(key: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{key}={value!r} must be True or False (without quotes)")


def require_positive_int(key: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key}={value!r} must be a whole number of at least 1")


def require_batch_size(value: Any) -> None:
    if isinstance(value, str) and not value.isdigit():
        raise ConfigError(
            f"batch_size={value!r} must be a whole number of at least 1; write micro_batch_size=auto to run it in "
            "forward passes that fit, or use_maximum_batch_size=True for the largest batch"
        )
    require_positive_int("batch_size", value)


def divisors_of(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def memory_size(num_bytes: float) -> str:
    """Return an amount of memory as a message shows it, such as ``1.50 GiB`` or ``512 MiB``."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.2f} GiB"
    return f"{num_bytes / 2**20:.0f} MiB" if num_bytes >= 10 * 2**20 else f"{num_bytes / 2**20:.1f} MiB"


def percent(share: float) -> str:
    """Write a share with two digits, as percent; more than all of it as 100 %."""
    return f"{float(f'{100 * min(share, 1.0):.2g}'):g} %"


def masked(values: Any, *, is_secret: bool = False) -> Any:
    """Return ``values``, of mappings and lists of a config, with the text under keys that name a secret left out.

    Numbers stay, as in ``max_tokens: 512``, and so do names of tokenizers and of special tokens.
    """
    if isinstance(values, Mapping):
        return {key: masked(value, is_secret=is_secret or names_secret(str(key))) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [masked(value, is_secret=is_secret) for value in values]
    return "(masked)" if is_secret and isinstance(values, str) and not _SPECIAL_TOKEN.fullmatch(values) else values


def without_secrets(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words of a command with secrets masked, and these secrets.

    A secret is the value of an option or an assignment whose name says so, or a text that looks like a token.
    """
    shown: list[str] = []
    secrets: list[str] = []
    option = ""  # before a word
    for word in command:
        named = [(match[1], match[2]) for match in _ASSIGNED.finditer(word)]
        named += [] if word.startswith("-") else [(option, word)]
        found = [value for name, value in named if names_secret(name.replace("-", "_")) and _may_be_secret(name, value)]
        found += [next(filter(None, match.groups())) for match in _TOKEN.finditer(word)]
        secrets += found
        for secret in sorted(found, key=len, reverse=True):
            word = word.replace(secret, "(masked)")
        shown.append(word)
        option = word if word.startswith("--") and "=" not in word else ""
    return shown, secrets


def _may_be_secret(name: str, value: str) -> bool:
    """Return False for a number, as of tokens or keys, and for what stands for no value or is a special token."""
    is_number = re.fullmatch(r"[\d.,]+", value) is not None and not re.search("secret|passw", name, re.IGNORECASE)
    return not is_number and value.lower() not in ("none", "true", "false") and not _SPECIAL_TOKEN.fullmatch(value)


def names_secret(key: str) -> bool:
    return _SECRET.search(_NO_SECRET.sub("", key)) is not None


def install_extra(name: str) -> str:
    """Return the command that installs what an extra of this package needs. No index has the package itself."""
    return f"pip install '.[{name}]' in the folder of adaptive-batching's source"


def nearest_path(path: str) -> str:
    """Return the dotted path of what a module has under a name near that in ``path``; empty if there is none."""
    module, _, name = path.rpartition(".")
    names: list[str] = []
    with contextlib.suppress(ImportError, ValueError):
        names = [name for name, value in vars(importlib.import_module(module)).items() if callable(value)]
    match = difflib.get_close_matches(name, names, n=1)
    return f"{module}.{match[0]}" if match else ""


def plural(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 sample``, ``2,048 samples``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its kind."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


SEARCH_NAMES = ("predict", "power_of_two", "binary_search")
"""Ways to look for the largest batch, which :mod:`adaptive_batching._probe.search` has."""
