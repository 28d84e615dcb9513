"""``dry-run``: run a command on an emulated card, and say what it takes."""

from __future__ import annotations

import argparse
import contextlib
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
from pathlib import Path
from typing import Any

from adaptive_batching._dry_run import FOLDER, STEPS
from adaptive_batching._dry_run.answer import Card, DryRun, Ending, as_object, in_words, processes_in, read_dry_run
from adaptive_batching._emulated_device import (
    MOST_DEVICES,
    BuildError,
    EmulatedDevice,
    parse_capability,
    write_nvidia_smi,
)
from adaptive_batching._gpus import find_gpus
from adaptive_batching._plan import gpu_memory
from adaptive_batching._values import ConfigError

MISTAKE = 2  # exit code
GRACE = 10  # seconds that a script has to end after an interrupt
HINT = 20  # seconds without a step after which a user hears of it
_EXAMPLES = """examples:
  {prog} --gpu 4090 -- python train.py --batch-size 8
  {prog} --gpu H100 --devices 8 -- torchrun --nproc_per_node 8 train.py
  {prog} --gpu A100 lora_finetune_single_device --config llama3_1/8B_lora_single_device

exit codes: 0 fits, 1 does not, 3 tight, 4 cannot tell, 2 a mistake on the command line"""


CommandOfRecipe = Callable[[Sequence[str], Path, int, int | None], list[str]]
"""Function of a recipe with its arguments, a folder, devices and tokens of a sample that returns what runs it."""


def add_dry_run(subparsers: Any, prog: str, command_of_recipe: CommandOfRecipe) -> None:
    """Add ``dry-run``."""
    text = (
        "Run a training script, or a recipe, on an emulated GPU: say whether it fits, what takes the memory, and "
        "where. Needs Linux on x86-64, a CUDA build of torch and a C++ compiler, and no GPU."
    )
    parser = subparsers.add_parser(
        "dry-run", prog=f"{prog} dry-run", help=text.split(":")[0] + ".", description=text,
        usage="%(prog)s (--gpu NAME | --memory 24GiB) [options] -- COMMAND\n"
        "       %(prog)s (--gpu NAME | --memory 24GiB) [options] RECIPE --config CONFIG [key=value ...]",
        epilog=_EXAMPLES.format(prog=f"{prog} dry-run"), formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    card = parser.add_mutually_exclusive_group(required=True)
    card.add_argument("--gpu", metavar="NAME", help="a GPU by name, such as 4090 or 'h100 80gb'")
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
    parser.add_argument("--sequence-length", type=int, metavar="N", help="of a recipe: tokens of each sample")
    parser.add_argument("--json", action="store_true", help="print one JSON object; the script prints to stderr")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write a page of HTML about it")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="with its arguments")
    parser.set_defaults(func=lambda args: sys.exit(_run(args, command_of_recipe)))


def _run(args: argparse.Namespace, command_of_recipe: CommandOfRecipe) -> int:
    try:
        with tempfile.TemporaryDirectory(prefix="dry-run-") as folder:
            run = _dry_run(args, command_of_recipe, Path(folder))
        if args.page is not None:
            from adaptive_batching._dry_run.picture import write_page

            write_page(run, args.page, args.command)
    except (BuildError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return MISTAKE
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}; name another file", file=sys.stderr)
        return MISTAKE
    print(json.dumps(as_object(run)) if args.json else "\n".join(["", *in_words(run)]))
    return run.answer.value


def _dry_run(args: argparse.Namespace, command_of_recipe: CommandOfRecipe, folder: Path) -> DryRun:
    args.devices = _devices(args)
    device, card = _device(args)
    for name in ("steps", "sequence_length"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least 1")
    if not args.max_seconds > 0:
        raise ConfigError(f"--max-seconds {args.max_seconds:g} must be more than 0")
    if args.page is not None and not args.page.absolute().parent.is_dir():
        raise ConfigError(f"--page {args.page}: there is no folder {args.page.absolute().parent}")
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise ConfigError("which command shall run? Write it after --, such as: -- python train.py")
    if is_recipe := args.command[0] != "--" and shutil.which(command[0]) is None:
        command = command_of_recipe(command, folder, args.devices, args.sequence_length)
    notes = folder / "processes"
    notes.mkdir()
    steps = sys.maxsize if args.whole else args.steps
    write_nvidia_smi(folder / "bin")
    environment = _environment(device.environment(os.environ), notes, steps, folder / "bin")
    ending = _end_of(command, environment, notes, args.max_seconds, to_stderr=args.json)
    if is_recipe and ending.exit_code == MISTAKE:
        raise SystemExit(MISTAKE)  # it has said which
    return read_dry_run(notes, card, ending)


def _device(args: argparse.Namespace) -> tuple[EmulatedDevice, Card]:
    """Return the device that the command line asks for: of a name that is several cards, the smallest."""
    capability, processors = (8, 0), 108
    device_name = "emulated device"
    if args.gpu is not None:
        gpu = min(find_gpus(args.gpu), key=lambda gpu: gpu.memory_bytes)
        name, memory, capability, processors = gpu.name, gpu.memory_bytes, gpu.capability, gpu.processors
        device_name = gpu.device_name
    else:
        name, memory = "card", gpu_memory(args.memory)
    if args.capability is not None:
        capability = parse_capability(args.capability)
    if not 1 <= args.devices <= MOST_DEVICES:
        raise ConfigError(f"--devices {args.devices} must be 1 to {MOST_DEVICES}")
    device = EmulatedDevice(memory, count=args.devices, capability=capability, processors=processors, name=device_name)
    return device, Card(name, memory, device.context_bytes)


def _devices(args: argparse.Namespace) -> int:
    """Return the cards asked for, or else one for each process that a launcher starts."""
    if args.devices is not None:
        return int(args.devices)
    started = re.search(r" --(?:nproc[_-]per[_-]node|num[_-]processes|num[_-]gpus)[= ](\d+)\b", " ".join(args.command))
    return int(started[1]) if started else 1


def _environment(on_device: Mapping[str, str], notes: Path, steps: int, programs: Path) -> dict[str, str]:
    """Return the environment of a script that is watched, with this Python before others and real GPUs hidden."""
    hidden = {"CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"}
    own = {
        "EMULATED_DEVICE_WATCH": "adaptive_batching._dry_run.watch",
        "EMULATED_DEVICE_WATCH_ERRORS": "adaptive_batching._dry_run.errors", FOLDER: str(notes), STEPS: str(steps),
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
    with _interruptible():
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
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    return Ending(child.returncode, interrupted, time.perf_counter() - begun, waited)


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
