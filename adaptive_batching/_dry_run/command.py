"""``dry-run``: run a command on an emulated card, and say what it takes."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from adaptive_batching._dry_run import FOLDER, STEPS, TIME
from adaptive_batching._dry_run.answer import (
    VERSION,
    Card,
    DryRun,
    Ending,
    as_object,
    in_words,
    processes_in,
    read_dry_run,
)
from adaptive_batching._dry_run.calibration import as_option, corrected_by, read_correction
from adaptive_batching._dry_run.compared import Column, compare
from adaptive_batching._dry_run.dry import offline
from adaptive_batching._emulated_device import (
    MOST_DEVICES,
    BuildError,
    EmulatedDevice,
    parse_capability,
    write_nvidia_smi,
)
from adaptive_batching._gpus import Gpu, find_gpus, read_card
from adaptive_batching._plan import gpu_memory
from adaptive_batching._step_time.forecast import RunLength
from adaptive_batching._step_time.seconds import Correction
from adaptive_batching._values import ConfigError

MISTAKE = 2  # exit code
GRACE_OF_CLEANERS = 3.0  # seconds
GRACE = 10  # seconds that a script has to end after an interrupt
# Of which each process gets a card of its own
_LAUNCHERS = (
    "torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "accelerate.commands.launch",
    "deepspeed", "tune", "trl", "axolotl", "adaptive-batching",
)  # fmt: skip
_STARTED = re.compile(r" --(?:nproc[_-]per[_-]node|num[_-]processes|num[_-]gpus)[= ](\d+) ")
_CLEANERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")  # remove shared memory that others have left
HINT = 20  # seconds without a step after which a user hears of it
BATCH_SIZE = "{batch_size}"  # in a command, for each of --batch-sizes
_EXAMPLES = """examples:
  {prog} --gpu 4090 -- python train.py --batch-size 8
  {prog} --gpu 4090 --gpu H100 --price 0.4 --price 2.5 --epochs 3 -- python train.py
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
        help="stop a script that takes no step for so long (default: 300)",
    )  # fmt: skip
    parser.add_argument(
        "--batch-sizes", metavar="4,8,16", help="compare these: '{batch_size}' in COMMAND, batch_size of a recipe"
    )
    times = parser.add_argument_group("time")
    times.add_argument("--no-time", dest="time", action="store_false", help="do not say how long a step takes")
    whole = times.add_mutually_exclusive_group()
    whole.add_argument("--epochs", type=float, metavar="N", help="epochs of the whole run, for its hours")
    whole.add_argument("--steps-in-all", type=int, metavar="N", help="or its optimizer steps")
    whole.add_argument("--tokens", type=float, metavar="N", help="or its tokens, padding included, such as 1e9")
    times.add_argument(
        "--price", type=float, metavar="1.99", action="append", default=[],
        help="of an hour of one GPU, for the cost: one for all, or one for each --gpu in their order",
    )  # fmt: skip
    of_card = times.add_mutually_exclusive_group()
    of_card.add_argument(
        "--calibrate", type=Path, metavar="RECORD",
        help="record of a run of COMMAND on this GPU (report.jsonl): correct by what it took",
    )  # fmt: skip
    of_card.add_argument("--correction", metavar="card=1.07", help="the correction that --calibrate has said")
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
        for number, column in enumerate(columns):
            if len(columns) > 1:
                print(f"dry-run: {column.name} ({number + 1} of {len(columns)})", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(prefix="dry-run-") as folder:
                run = _dry_run(args, column, command_of_recipe, Path(folder))
            if args.calibrate is not None and not runs:
                correction = corrected_by(args.calibrate, run)
            runs.append(replace(run, correction=correction))
        if args.page is not None:
            from adaptive_batching._dry_run.picture import write_page

            write_page(columns, runs, args.page, args.command)
    except (BuildError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return MISTAKE
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}; name another file", file=sys.stderr)
        return MISTAKE
    said = [] if args.calibrate is None else [f"  corrected by {args.calibrate}: --correction {as_option(correction)}"]
    if len(columns) == 1:
        shown, lines = as_object(runs[0], columns[0].length), in_words(runs[0], columns[0].length)
    else:
        shown, lines = compare(columns, runs)
        shown = {"version": VERSION, **shown}
    print(json.dumps(shown) if args.json else "\n".join(["", *lines, *said]))
    return min(runs, key=lambda run: run.card.memory_bytes).answer.value


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
        raise ConfigError(f"--{asked[0].replace('_', '-')} has no effect with {why}, which tells no time")
    if asked and args.memory is not None:
        raise ConfigError(
            f"--{asked[0].replace('_', '-')} has no effect with --memory: time is told of a card that is named "
            "(--gpu) or described (--card)"
        )
    return read_correction(args.correction)


def _dry_run(args: argparse.Namespace, column: Column, command_of_recipe: CommandOfRecipe, folder: Path) -> DryRun:
    machine = folder / "machine"
    machine.mkdir()
    device, card = _device(args, column.gpu, machine)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise ConfigError("which command shall run? Write it after --, such as: -- python train.py")
    is_recipe = args.command[0] != "--" and shutil.which(command[0]) is None
    if is_recipe and args.epochs is not None:
        raise ConfigError(
            f"--epochs {args.epochs:g}: other data stand in for a recipe's; give --steps-in-all or --tokens"
        )
    if column.batch_size is not None:
        command = _at_batch_size(command, column.batch_size, is_recipe=is_recipe)
    if is_recipe:
        command = command_of_recipe(command, folder, args.devices, args.sequence_length)
    notes = folder / "processes"
    notes.mkdir()
    scratch = folder / "scratch"
    scratch.mkdir()
    steps = sys.maxsize if args.whole else args.steps
    write_nvidia_smi(folder / "bin")
    environment = _environment(device.environment(os.environ), notes, steps, folder / "bin")
    environment |= {**offline(scratch), "EMULATED_DEVICE_KEEPS_BEFORE": f"{args.begun:.6f}"}
    if args.time and not args.whole and column.gpu is not None:
        environment[TIME] = "1"
    ending = _end_of(command, environment, notes, args.max_seconds, to_stderr=args.json)
    if is_recipe and ending.exit_code == MISTAKE:
        raise SystemExit(MISTAKE)  # it has said which
    list_of_kept = machine / "kept"
    kept = dict.fromkeys(list_of_kept.read_text(errors="replace").splitlines()) if list_of_kept.exists() else ()
    return read_dry_run(notes, card, ending, notes_work=TIME in environment, kept=[*kept])


def _at_batch_size(command: list[str], size: int, *, is_recipe: bool) -> list[str]:
    if any(BATCH_SIZE in part for part in command):
        return [part.replace(BATCH_SIZE, str(size)) for part in command]
    if not is_recipe:
        raise ConfigError(f"--batch-sizes needs {BATCH_SIZE} in the command, such as: --batch-size {BATCH_SIZE}")
    return [*command, f"batch_size={size}"]


def _device(args: argparse.Namespace, gpu: Gpu | None, machine: Path) -> tuple[EmulatedDevice, Card]:
    """Return the device that the command line asks for: of a name that is several cards, the smallest."""
    capability, processors = (8, 0), 108
    device_name = "emulated device"
    if gpu is not None:
        name, memory, capability, processors = gpu.name, gpu.memory_bytes, gpu.capability, gpu.processors
        device_name = gpu.device_name
    else:
        name, memory = "card", gpu_memory(args.memory)
    if args.capability is not None:
        capability = parse_capability(args.capability)
    if not 1 <= args.devices <= MOST_DEVICES:
        raise ConfigError(f"--devices {args.devices} must be 1 to {MOST_DEVICES}")
    device = EmulatedDevice(
        memory, count=args.devices, capability=capability, processors=processors, machine=machine, name=device_name
    )
    return device, Card(name, memory, device.context_bytes, gpu)


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


def _environment(on_device: Mapping[str, str], notes: Path, steps: int, programs: Path) -> dict[str, str]:
    """Return the environment of a script that is watched, with this Python before others and real GPUs hidden."""
    hidden = {"CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"}
    own = {
        "EMULATED_DEVICE_WATCH": "adaptive_batching._dry_run.watch",
        "EMULATED_DEVICE_WATCH_ERRORS": "adaptive_batching._dry_run.errors",
        "EMULATED_DEVICE_PREPARES": "adaptive_batching._dry_run.dry", FOLDER: str(notes), STEPS: str(steps),
        "PATH": os.pathsep.join([str(programs), str(Path(sys.executable).parent), on_device.get("PATH", os.defpath)]),
    }  # fmt: skip
    return {**{name: value for name, value in on_device.items() if name not in hidden}, **own}


def _end_of(
    command: list[str], environment: Mapping[str, str], notes: Path, max_seconds: float, *, to_stderr: bool
) -> Ending:
    """Run a command to its end, or until it has taken no step for so many seconds, and end what it has started."""
    begun = time.perf_counter()
    interrupted, waited = False, None
    output = sys.stderr if to_stderr else None
    others = _descendants(os.getpid())
    with _interruptible(), _orphans_adopted():
        try:
            child = subprocess.Popen(command, env=environment, start_new_session=True, stdout=output)
        except OSError as error:
            line = f"{command[0]} cannot be run ({error.strerror}); name a program after --"
            raise ConfigError(line) from None
        try:
            if not _wait_for(child, notes, max_seconds):
                waited = max_seconds
                _interrupt(child)
        except KeyboardInterrupt:
            interrupted = True
            _interrupt(child)
        finally:
            _end_all(child, others)
    return Ending(child.returncode, interrupted, time.perf_counter() - begun, waited)


def _end_all(child: subprocess.Popen[bytes], others: Sequence[int]) -> None:
    """End all that a command has started, also in sessions of their own, as torchrun's workers are.

    What removes the shared memory of processes that are gone ends by itself, and is given a moment for it.
    """
    deadline = time.monotonic() + GRACE_OF_CLEANERS
    while (left := set(_descendants(os.getpid())) - {*others}) and time.monotonic() < deadline + GRACE:
        for process in left:
            if time.monotonic() > deadline or not _is_cleaner(process):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            if process != child.pid:
                with contextlib.suppress(ChildProcessError):  # not ours before its parent has ended
                    os.waitpid(process, os.WNOHANG)
        child.poll()
        time.sleep(0.02)
    child.wait()


def _descendants(process: int) -> list[int]:
    """Return the processes that a process has started, and those that these have, except what is not yet waited for."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state, parent = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(folder.name))
    found = [*children.get(process, [])]
    for each in found:
        found += children.get(each, [])
    return found


def _is_cleaner(process: int) -> bool:
    try:
        command = Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False
    return any(name in command for name in _CLEANERS)


@contextlib.contextmanager
def _orphans_adopted() -> Iterator[None]:
    """Have what a script leaves running become a child of this process, by which it is found."""
    set_child_subreaper = 36  # linux/prctl.h
    set_to = ctypes.CDLL(None).prctl
    set_to(set_child_subreaper, 1, 0, 0, 0)
    try:
        yield
    finally:
        set_to(set_child_subreaper, 0, 0, 0, 0)


def _wait_for(child: subprocess.Popen[bytes], notes: Path, max_seconds: float) -> bool:
    """Wait for a script's end; False if it takes no step for so many seconds. Say early that none was seen."""
    since = time.monotonic()
    steps, hinted = 0, False
    while True:
        try:
            child.wait(0.5)
            return True
        except subprocess.TimeoutExpired:
            taken = sum(len(process["steps"]) for process in processes_in(notes))
            waited = time.monotonic() - since
            if taken > steps:
                steps, since = taken, time.monotonic()
            elif waited >= max_seconds:
                return False
            elif not steps and not hinted and waited >= HINT:
                hinted = True
                line = f"dry-run: no step of an optimizer of torch.optim in {HINT} s"
                print(
                    f"{line}; without one the script is stopped after {max_seconds:g} s (--max-seconds)",
                    file=sys.stderr,
                )


def _interrupt(child: subprocess.Popen[bytes]) -> None:
    """Ask a script to end, and wait for it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
        child.wait(GRACE)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Have SIGINT and SIGTERM raise KeyboardInterrupt, even where a shell that runs this in the background ignores one.

    What is started inside does not ignore them either: a handler is no longer there after exec, an ignored signal is.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
