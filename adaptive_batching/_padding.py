"""``padding``: how much of a data set's batches is padding. It reads JSON alone, and needs no tokenizer."""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from adaptive_batching._values import ConfigError

_SHUFFLES = 5
_GROUPED = 50  # batches that transformers' group_by_length sorts together


def add_padding(subparsers: Any, prog: str) -> None:
    """Add ``padding``."""
    text = "Measure how much of a data set's batches is padding, and so what running without it saves."
    parser = subparsers.add_parser("padding", prog=f"{prog} padding", help=text, description=text)
    parser.add_argument("data", type=Path, help="a file of JSON (a list of samples) or of JSON lines (one in each)")
    parser.add_argument("--batch-size", type=int, default=8, help="samples in a forward pass; default: %(default)s")
    parser.add_argument(
        "--field", action="append", default=[], metavar="NAME",
        help="the part of a sample to measure; may be given several times; default: input_ids, or else all texts",
    )  # fmt: skip
    parser.add_argument("--max-length", type=int, help="cut longer samples to this length, in the same unit")

    def padding(args: argparse.Namespace) -> None:
        for option, value in (("--batch-size", args.batch_size), ("--max-length", args.max_length)):
            if value is not None and value < 1:
                raise ConfigError(f"{option} {value} must be at least 1")
        try:
            measured = [_length(sample, args.field) for sample in _samples(args.data)]
        except OSError as error:
            raise ConfigError(f"{args.data}: {error.strerror or error}; name another file") from None
        except ValueError as error:
            raise ConfigError(f"{args.data}: {error}") from None
        units = {unit for length, unit in measured if length}
        if len(units) > 1:
            raise ConfigError(
                f"{args.data}: some samples have tokens and some only texts; name what to measure with --field"
            )
        lengths = [min(length, args.max_length or length) for length, _ in measured if length]
        if len(lengths) < args.batch_size:
            raise ConfigError(
                f"{args.data} has {len(lengths)} samples that are not empty, and --batch-size {args.batch_size} asks "
                "for more; give a smaller one, or name what to measure with --field"
            )
        print("\n".join(report(lengths, args.batch_size, *units)))

    parser.set_defaults(func=padding)


def report(lengths: Sequence[int], batch_size: int, unit: str) -> Iterator[str]:
    """Yield the lines of an answer; lengths are in ``unit``, and none is 0."""
    mean, longest = statistics.fmean(lengths), max(lengths)
    yield (
        f"{len(lengths):,} samples, in {unit}: mean {mean:,.0f}, median {statistics.median(lengths):,.0f}, "
        f"longest {longest:,}; mean over longest {mean / longest:.2f}"
    )
    padded = padding_of(lengths, batch_size)
    grouped = padding_of(lengths, batch_size, grouped=True)
    yield f"padded batches of {batch_size}: a step computes {padded:.2f} times as many tokens as its samples have"
    yield f"the same with group_by_length: {grouped:.2f} times"
    yield "without padding: 1.00 times"


def padding_of(lengths: Sequence[int], batch_size: int, *, grouped: bool = False) -> float:
    """Return tokens of padded batches over those of their samples, as a mean over orders drawn at random.

    With ``grouped``, each 50 batches are sorted by length first, as transformers' ``group_by_length`` does.
    """
    draws = random.Random(0)
    padded = 0
    for _ in range(_SHUFFLES):
        order = draws.sample(lengths, len(lengths))
        if grouped:
            size = batch_size * _GROUPED
            parts = (order[start : start + size] for start in range(0, len(order), size))
            order = [length for part in parts for length in sorted(part, reverse=True)]
        batches = (order[start : start + batch_size] for start in range(0, len(order), batch_size))
        padded += sum(len(batch) * max(batch) for batch in batches)
    return padded / _SHUFFLES / sum(lengths)


def _samples(path: Path) -> Iterator[Any]:
    text = path.read_text()
    with contextlib.suppress(ValueError):  # several values, one in each line
        whole = json.loads(text)
        yield from whole if isinstance(whole, list) else [whole]
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError:
                raise ValueError(
                    f"line {number} is not JSON; give JSON or JSON lines, such as datasets' to_json writes"
                ) from None


def _length(sample: Any, fields: Sequence[str]) -> tuple[int, str]:
    """Return a sample's length and its unit: tokens, if it has lists of numbers, or else characters of its texts."""
    if isinstance(sample, dict):
        if missing := [name for name in fields if name not in sample]:
            raise ValueError(f"--field {missing[0]} is not in each sample; name one of {', '.join(map(str, sample))}")
        if names := fields or [name for name in sample if name == "input_ids"]:
            sample = [sample[name] for name in names]
    tokens, characters = _count(sample)
    return (tokens, "tokens") if tokens else (characters, "characters")


def _count(value: Any) -> tuple[int, int]:
    """Return how many numbers are in the lists of a value, however deep, and how many characters in its texts."""
    if isinstance(value, str):
        return 0, len(value)
    if isinstance(value, list) and value and all(isinstance(each, int) for each in value):
        return len(value), 0
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    counts = [_count(part) for part in parts]
    return sum(tokens for tokens, _ in counts), sum(characters for _, characters in counts)
