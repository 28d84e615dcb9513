"""Run a command on emulated cards, watched, and end all that it has started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from adaptive_batching._dry_run import FOLDER, STEPS, TIME
from adaptive_batching._dry_run.answer import Card, DryRun, Ending, processes_in, read_dry_run
from adaptive_batching._dry_run.cards import Gpu
from adaptive_batching._dry_run.device import MOST_DEVICES, EmulatedDevice, write_nvidia_smi
from adaptive_batching._dry_run.dry import offline
from adaptive_batching._values import ConfigError

GRACE_OF_CLEANERS = 3.0  # seconds
GRACE = 10  # seconds that a script has to end after an interrupt
HINT = 20  # seconds without a step after which a user hears of it
_CLEANERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")  # remove shared memory that others have left


@dataclass(frozen=True)
class Launch:
    """The cards of a dry run, and how long it runs."""

    gpu: Gpu | None
    """None for a card of which only the memory is known."""
    memory_bytes: int = 0
    """Where there is no ``gpu``."""
    capability: tuple[int, int] | None = None
    """None for that of ``gpu``, or 8.0."""
    devices: int = 1
    steps: int = 3
    notes_work: bool = True
    """True to record one extra step and time it, which needs a known card."""
    max_seconds: float = 300
    """Without a step, after which the command is ended."""
    begun: float = field(default_factory=time.time)
    """Files from before this moment are kept."""
    output: int | IO[bytes] | None = None
    """Where the command prints to; None for where this process does."""
    errors: int | IO[bytes] | None = None
    says: bool = True
    """True to say so if the command is slow to reach its first step."""

    def __post_init__(self) -> None:
        if not 1 <= self.devices <= MOST_DEVICES:
            raise ConfigError(f"--devices {self.devices} must be 1 to {MOST_DEVICES}")

    def run(self, command: Sequence[str], folder: Path, extra: Mapping[str, str] | None = None) -> DryRun:
        """Run a command; ``folder``, which is empty or has what the command needs, is for all that is noted.

        Args:
            command: The command with its arguments.
            folder: As above.
            extra: Variables of its environment, besides those of this process.
        """
        machine, notes, scratch = (folder / name for name in ("machine", "processes", "scratch"))
        for path in (machine, notes, scratch):
            path.mkdir()
        device, card = self._device(machine)
        write_nvidia_smi(folder / "bin")
        environment = _environment(
            device.environment({**os.environ, **(extra or {})}), notes, self.steps, folder / "bin"
        )
        environment |= {**offline(scratch), "EMULATED_DEVICE_KEEPS_BEFORE": f"{self.begun:.6f}"}
        notes_work = self.notes_work and self.gpu is not None
        if notes_work:
            environment[TIME] = "1"
        ending = self._end_of(command, environment, notes)
        list_of_kept = machine / "kept"
        kept = dict.fromkeys(list_of_kept.read_text(errors="replace").splitlines()) if list_of_kept.exists() else ()
        return read_dry_run(notes, card, ending, notes_work=notes_work, kept=[*kept])

    def _device(self, machine: Path) -> tuple[EmulatedDevice, Card]:
        gpu = self.gpu
        if gpu is None:
            name, device_name, memory, capability, processors = (
                "card",
                "emulated device",
                self.memory_bytes,
                (8, 0),
                108,
            )
        else:
            name, device_name, memory = gpu.name, gpu.device_name, gpu.memory_bytes
            capability, processors = gpu.capability, gpu.processors
        device = EmulatedDevice(
            memory, count=self.devices, capability=self.capability or capability, processors=processors,
            machine=machine, name=device_name,
        )  # fmt: skip
        return device, Card(name, memory, device.context_bytes, gpu)

    def _end_of(self, command: Sequence[str], environment: Mapping[str, str], notes: Path) -> Ending:
        """Run a command to its end, or until it has taken no step for long enough, and end what it has started."""
        begun = time.perf_counter()
        interrupted, waited = False, None
        others = _descendants(os.getpid())
        with interruptible(), _orphans_adopted():
            try:
                child = subprocess.Popen(
                    command, env=environment, start_new_session=True, stdout=self.output, stderr=self.errors
                )
            except OSError as error:
                line = f"{command[0]} cannot be run ({error.strerror}); name a program after --"
                raise ConfigError(line) from None
            try:
                if not _wait_for(child, notes, self.max_seconds, says=self.says):
                    waited = self.max_seconds
                    _interrupt(child)
            except KeyboardInterrupt:
                interrupted = True
                _interrupt(child)
            finally:
                _end_all(child, others)
        return Ending(child.returncode, interrupted, time.perf_counter() - begun, waited)


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


def _wait_for(child: subprocess.Popen[bytes], notes: Path, max_seconds: float, *, says: bool) -> bool:
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
            elif says and not steps and not hinted and waited >= HINT:
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
def interruptible() -> Iterator[None]:
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
