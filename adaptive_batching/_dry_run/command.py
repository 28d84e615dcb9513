"""``dry-run``: run a command on an emulated card, and say what it takes."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from adaptive_batching._dry_run.answer import VERSION, DryRun, as_object
from adaptive_batching._dry_run.answer_in_words import in_words
from adaptive_batching._dry_run.calibration import as_option, corrected_by, read_correction
from adaptive_batching._dry_run.cards import Gpu, find_gpus, gpu_memory, read_card
from adaptive_batching._dry_run.compared import Column, compare
from adaptive_batching._dry_run.device import parse_capability
from adaptive_batching._dry_run.largest import MOST, largest_that_fits
from adaptive_batching._dry_run.on_cards import Launch
from adaptive_batching._dry_run.time.forecast import RunLength
from adaptive_batching._dry_run.time.seconds import Correction
from adaptive_batching._dry_run.verdict import Answer
from adaptive_batching._values import ConfigError

MISTAKE = 2  # exit code
# Of which each process gets a card of its own
_LAUNCHERS = (
    "torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "accelerate.commands.launch",
    "deepspeed", "tune", "trl", "axolotl", "adaptive-batching",
)  # fmt: skip
_STARTED = re.compile(r" --(?:nproc[_-]per[_-]node|num[_-]processes|num[_-]gpus)[= ](\d+) ")
BATCH_SIZE = "{batch_size}"  # in a command, for each of --batch-sizes or --largest
_EXAMPLES = """examples:
  {prog} --gpu 4090 -- python train.py --batch-size 8
  {prog} --gpu 4090 --gpu H100 --price 0.4 --price 2.5 --epochs 3 -- python train.py
  {prog} --gpu 4090 --largest -- python train.py --batch-size {{batch_size}}
  {prog} --gpu H100 --devices 8 -- torchrun --nproc_per_node 8 train.py
  {prog} --gpu A100 lora_finetune_single_device --config llama3_1/8B_lora_single_device

exit codes: 0 fits, 1 does not, 3 tight, 4 cannot tell, 2 a mistake on the command line"""


CommandOfRecipe = Callable[[Sequence[str], Path, int, int | None], list[str]]
"""Function of a recipe with its arguments, a folder, devices and tokens of a sample that returns what runs it."""


def add_dry_run(subparsers: Any, prog: str, command_of_recipe: CommandOfRecipe) -> None:
    """Add ``dry-run``."""
    text = (
        "Run a training script, or a recipe, on an emulated GPU: say whether it fits, what takes the memory and where, "
        "how long a step takes and why. Needs Linux on x86-64, a CUDA build of torch and a C++ compiler, and no GPU."
    )
    parser = subparsers.add_parser(
        "dry-run", prog=f"{prog} dry-run", help=text.split(":")[0] + ".", description=text,
        usage="%(prog)s (--gpu NAME | --card FILE | --memory 24GiB) [options] -- COMMAND\n"
        "       %(prog)s (--gpu NAME | ...) [options] RECIPE --config CONFIG [key=value ...]",
        epilog=_EXAMPLES.format(prog=f"{prog} dry-run"), formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    card = parser.add_argument_group("card")
    card.add_argument(
        "--gpu", metavar="NAME", action="append", default=[],
        help="a GPU by name, such as 4090 or 'h100 80gb'; several --gpu give a table",
    )  # fmt: skip
    card.add_argument(
        "--card", metavar="FILE", action="append", default=[], type=Path, help="a GPU of your own, described in JSON"
    )
    card.add_argument("--memory", metavar="24GiB", help="memory of the card; a plain number such as 24 is GiB")
    parser.add_argument("--capability", metavar="8.9", help="compute capability (default: that of --gpu, or 8.0)")
    parser.add_argument("--devices", type=int, metavar="N", help="cards (default: 1, or torchrun's --nproc_per_node)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, default=3, metavar="N", help="optimizer steps to run (default: 3)")
    length.add_argument("--whole", action="store_true", help="run the script to its end, evaluation included")
    parser.add_argument(
        "--max-seconds", type=float, default=300, metavar="S",
        help="stop a script that takes no step for so many seconds (default: 300)",
    )  # fmt: skip
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument(
        "--batch-sizes", metavar="4,8,16", help="compare these: '{batch_size}' in COMMAND, batch_size of a recipe"
    )
    sizes.add_argument(
        "--largest", action="store_true", help=f"find the largest of them that fits, up to {MOST:,}, by several runs"
    )
    times = parser.add_argument_group("time")
    times.add_argument("--no-time", dest="time", action="store_false", help="do not forecast how long a step takes")
    whole = times.add_mutually_exclusive_group()
    whole.add_argument("--epochs", type=float, metavar="N", help="epochs of the whole run, for its hours")
    whole.add_argument("--steps-in-all", type=int, metavar="N", help="or its optimizer steps")
    whole.add_argument("--tokens", type=float, metavar="N", help="or its tokens, padding included, such as 1e9")
    times.add_argument(
        "--price", type=float, metavar="1.99", action="append", default=[],
        help="of an hour of one GPU, for the cost: one for all, or one for each --gpu, in the same order",
    )  # fmt: skip
    of_card = times.add_mutually_exclusive_group()
    of_card.add_argument(
        "--calibrate", type=Path, metavar="RECORD",
        help="record of a run of COMMAND on this GPU (report.jsonl), to correct the forecast by its times",
    )  # fmt: skip
    of_card.add_argument("--correction", metavar="card=1.07", help="the correction that --calibrate printed")
    parser.add_argument("--sequence-length", type=int, metavar="N", help="of a recipe: tokens of each sample")
    parser.add_argument("--json", action="store_true", help="print one JSON object; the script prints to stderr")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write a page of HTML about it")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="with its arguments")
    parser.set_defaults(func=lambda args: sys.exit(_run(args, command_of_recipe)))


def _run(args: argparse.Namespace, command_of_recipe: CommandOfRecipe) -> int:
    args.begun = time.time()
    try:
        args.devices = _devices(args)
        columns, correction = _columns(args), _checked(args)
        runs: list[DryRun] = []

        def run_column(column: Column, note: str) -> DryRun:
            nonlocal correction
            with tempfile.TemporaryDirectory(prefix="dry-run-") as folder:
                run = _dry_run(args, column, note, command_of_recipe, Path(folder))
            if args.calibrate is not None and not runs:
                correction = corrected_by(args.calibrate, run)
            runs.append(replace(run, correction=correction))
            return runs[-1]

        if args.largest:
            return _largest(args, columns, run_column)
        for number, column in enumerate(columns):
            run_column(column, f" ({number + 1} of {len(columns)})" if len(columns) > 1 else "")
        if args.page is not None:
            from adaptive_batching._dry_run.picture import write_page

            write_page(columns, runs, args.page, args.command)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}; name another file") from None
    said = [] if args.calibrate is None else [f"  corrected by {args.calibrate}: --correction {as_option(correction)}"]
    if len(columns) == 1:
        shown, lines = as_object(runs[0], columns[0].length), in_words(runs[0], columns[0].length)
    else:
        shown, lines = compare(columns, runs)
        shown = {"version": VERSION, **shown}
    print(json.dumps(shown) if args.json else "\n".join(["", *lines, *said]))
    return min(runs, key=lambda run: run.card.memory_bytes).answer.value


def _largest(args: argparse.Namespace, columns: Sequence[Column], run: Callable[[Column, str], DryRun]) -> int:
    """Find the largest batch size that fits by dry runs, print the sizes that ran, and return the exit code."""
    ran: dict[int, tuple[Column, DryRun]] = {}

    def fits(size: int) -> bool:
        column = replace(columns[0], name=f"batch size {size}", batch_size=size)
        ran[size] = column, run(column, f" ({len(ran) + 1})")
        if ran[size][1].answer is Answer.CANNOT_TELL:
            raise _CannotTellError(f"at a batch size of {size}, {ran[size][1].why_not}")
        return ran[size][1].answer is Answer.FITS

    try:
        largest = largest_that_fits(fits)
    except _CannotTellError as error:
        shown = {"version": VERSION, "answer": str(Answer.CANNOT_TELL), "largest": None, "why": str(error)}
        print(json.dumps(shown) if args.json else f"{Answer.CANNOT_TELL}: {error}")
        return Answer.CANNOT_TELL.value
    found, lines = compare(*zip(*(ran[size] for size in sorted(ran)), strict=True))
    said = f"the largest batch size that fits is {largest}" if largest else "not even a batch size of 1 fits"
    print(
        json.dumps({"version": VERSION, **found, "largest": largest})
        if args.json
        else "\n".join(["", *lines, "", said])
    )
    return int((Answer.FITS if largest else Answer.DOES_NOT_FIT).value)


class _CannotTellError(RuntimeError):
    """Raised where a dry run has no answer, without which the next size to try is not known."""


def _columns(args: argparse.Namespace) -> list[Column]:
    """Return the cards, or the sizes on one card, that are to be compared; most often it is one."""
    cards: list[Gpu | None] = [min(find_gpus(name), key=lambda gpu: gpu.memory_bytes) for name in args.gpu]
    cards += [read_card(path) for path in args.card]
    if bool(cards) == (args.memory is not None):
        raise ConfigError("give the card by --gpu, --card or --memory" + (", one of them" if cards else ""))
    cards = cards or [None]
    if args.price and len(args.price) not in (1, len(cards)):
        raise ConfigError(f"--price is given {len(args.price)} times for {len(cards)} cards; give one, or one for each")
    prices = args.price * len(cards) if len(args.price) == 1 else args.price or [None] * len(cards)
    lengths = [RunLength(args.epochs, args.steps_in_all, args.tokens, price) for price in prices]
    if args.largest and len(cards) > 1:
        raise ConfigError(f"--largest is found on one card, and {len(cards)} are given")
    if args.batch_sizes is None:
        return [
            Column(card.name if card else f"--memory {args.memory}", card, length, None)
            for card, length in zip(cards, lengths, strict=True)
        ]
    if len(cards) > 1:
        raise ConfigError(f"--batch-sizes {args.batch_sizes} are compared on one card, and {len(cards)} are given")
    try:
        sizes = [int(size) for size in args.batch_sizes.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        raise ConfigError(f"--batch-sizes {args.batch_sizes} must be numbers from 1 on, such as 4,8,16")
    return [Column(f"batch size {size}", cards[0], lengths[0], size) for size in sorted(sizes)]


def _checked(args: argparse.Namespace) -> Correction:
    """Refuse numbers and files that cannot be, before anything runs; return the correction that is given."""
    for name in ("steps", "sequence_length", "steps_in_all"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least 1")
    for name in ("max_seconds", "epochs", "tokens"):
        if (value := getattr(args, name)) is not None and not value > 0:
            raise ConfigError(f"--{name.replace('_', '-')} {value:g} must be more than 0")
    if wrong := [price for price in args.price if not price > 0]:
        raise ConfigError(f"--price {wrong[0]:g} must be more than 0")
    if args.page is not None and not args.page.absolute().parent.is_dir():
        raise ConfigError(f"--page {args.page}: there is no folder {args.page.absolute().parent}")
    if args.calibrate is not None and not args.calibrate.is_file():
        raise ConfigError(f"--calibrate {args.calibrate}: there is no such file; a run writes report.jsonl")
    asked = [name for name in ("epochs", "steps_in_all", "tokens", "calibrate", "correction") if getattr(args, name)]
    asked += ["price"] if args.price else []
    if asked and (args.whole or not args.time):
        why = "--whole" if args.whole else "--no-time"
        raise ConfigError(f"--{asked[0].replace('_', '-')} has no effect with {why}, which predicts no time")
    if asked and args.memory is not None:
        raise ConfigError(
            f"--{asked[0].replace('_', '-')} has no effect with --memory: time is predicted for a card that is named "
            "(--gpu) or described (--card)"
        )
    return read_correction(args.correction)


def _dry_run(
    args: argparse.Namespace, column: Column, note: str, command_of_recipe: CommandOfRecipe, folder: Path
) -> DryRun:
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise ConfigError("the command is missing: write it after --, such as -- python train.py")
    is_recipe = args.command[0] != "--" and shutil.which(command[0]) is None
    if is_recipe and args.epochs is not None:
        raise ConfigError(
            f"--epochs {args.epochs:g}: a recipe's data are replaced in a dry run, so the length of an epoch is "
            "unknown; give --steps-in-all or --tokens"
        )
    launch = Launch(
        column.gpu, 0 if column.gpu is not None else gpu_memory(args.memory),
        capability=None if args.capability is None else parse_capability(args.capability), devices=args.devices,
        steps=sys.maxsize if args.whole else args.steps, notes_work=args.time and not args.whole,
        max_seconds=args.max_seconds, begun=args.begun, output=sys.stderr.fileno() if args.json else None,
    )  # fmt: skip
    if column.batch_size is not None:
        option = "--largest" if args.largest else "--batch-sizes"
        command = _at_batch_size(command, column.batch_size, option, is_recipe=is_recipe)
    if is_recipe:
        command = command_of_recipe(command, folder, args.devices, args.sequence_length)
    if note:  # after all that can be refused
        print(f"dry-run: {column.name}{note}", file=sys.stderr, flush=True)
    run = launch.run(command, folder)
    if is_recipe and run.ending.exit_code == MISTAKE:
        raise SystemExit(MISTAKE)  # it has said which
    return run


def _at_batch_size(command: list[str], size: int, option: str, *, is_recipe: bool) -> list[str]:
    if any(BATCH_SIZE in part for part in command):
        return [part.replace(BATCH_SIZE, str(size)) for part in command]
    if not is_recipe:
        raise ConfigError(f"{option} needs {BATCH_SIZE} in the command, such as: --batch-size {BATCH_SIZE}")
    return [*command, f"batch_size={size}"]


def _devices(args: argparse.Namespace) -> int:
    """Return the cards asked for, or else one for each process that a launcher starts."""
    if args.devices is not None:
        return int(args.devices)
    started = _STARTED.search(" ".join(["", *_of_launcher(args.command), ""]))
    return int(started[1]) if started else 1


def _of_launcher(command: Sequence[str]) -> list[str]:
    """Return the arguments of a launcher, without those of the script that it starts; none if there is no launcher."""
    words = [word for part in command for word in part.split()]  # as in bash -c 'torchrun ...'
    at = next((n for n, word in enumerate(words) if Path(word).name in _LAUNCHERS), len(words))
    scripts = (n for n, word in enumerate(words) if word.endswith(".py") or (n > at and word in ("-m", "--module")))
    return words[at + 1 : next(scripts, len(words))]
