"""Watch a process of a script on the emulated device: its steps, its peaks, and what held the memory.

`start` is called when the process has imported torch (until then, `errors` watches); what is found goes to a file of
the process, which `answer` reads. A process that never asks for a device writes nothing but the error that ends it.
"""

from __future__ import annotations

import atexit
import functools
import gc
import os
import re
import sys
import threading
import time
import weakref
from bisect import bisect
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed._tools.common_utils import get_untyped_storages
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from adaptive_batching._dry_run import FOLDER, STEPS, TIME
from adaptive_batching._dry_run.device import control
from adaptive_batching._dry_run.device.values import ran
from adaptive_batching._dry_run.errors import describe_error, write_process
from adaptive_batching._dry_run.extra_step import ExtraStep
from adaptive_batching._dry_run.history import (
    GRADIENTS,
    STATES,
    WEIGHTS,
    Labels,
    Moments,
    line_of,
    line_of_script,
    place,
    read_history,
    step_of,
)
from adaptive_batching._dry_run.inputs import Inputs
from adaptive_batching._dry_run.script import ScriptNotes, is_rehearsing, stack_of
from adaptive_batching._memory.caching_allocator import allocator_advice, workspace_bytes
from adaptive_batching._memory.shortage import Shortage, StepStarts, cause_of

MOST_EVENTS = 2_000_000  # of the allocator that are remembered; older ones are forgotten
MOST_FRAMES = 40  # of a stack that are told
_OF_TRAINING = re.compile(r"[/\\](autograd|optim)[/\\]")  # files that run with gradients off, and belong to a step
EVERY = 1.0  # seconds after which peaks are written down, in case the process is killed


def start() -> None:
    """Watch this process, if the environment asks for it."""
    if FOLDER in os.environ:
        Watch(Path(os.environ[FOLDER]), int(os.environ[STEPS]), notes_work=TIME in os.environ).begin()


def _harmless(method: Callable[..., None]) -> Callable[..., None]:
    """Keep what goes wrong in a report from the script that it is about."""

    @functools.wraps(method)
    def reporting(self: Watch, *args: Any) -> None:
        try:
            method(self, *args)
        except Exception as error:
            self.trouble = f"{type(error).__name__} in {method.__name__}: {error}"

    return reporting


class Watch:
    """Watches one process of a script, and keeps what it has seen."""

    def __init__(self, folder: Path, most_steps: int, *, notes_work: bool) -> None:
        self._folder, self._most_steps, self._process = folder, most_steps, os.getpid()
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._counts: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._ends_us: list[int] = []  # of steps
        self._calls: list[tuple[int, int]] = []  # of optimizers: beginning and end
        self._called_us: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._counters: list[control.Counters] = []  # at the end of each step, after those of the beginning
        self._labels: list[Labels] = []
        self._out_of_memory: list[dict[str, Any]] = []
        self._starts = StepStarts()
        self._inputs = Inputs()
        self._peaks: dict[int, dict[str, int]] = {}  # of each device, of what has been reset since
        self._reserved_now: dict[int, int] = {}  # of each device
        self._retries_of_probe: dict[int, int] = {}  # of each device
        self._counts_probe = False  # while the allocator's peaks are those of a probe of ours, which is no training
        self._probed_us: int | None = None  # when a step of a probe was last seen
        self.trouble: str | None = None  # why something is missing from the report
        self._error: dict[str, Any] | None = None  # that ended the script
        self._is_ending = False  # when the backward pass is over
        self._captures_step = False
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()  # that have a step
        self._script = ScriptNotes(self._before_pass, self._after_pass)
        self._stopped = False  # by this watch, after as many steps as were asked for
        self._extra_step = ExtraStep(folder, self._inputs) if notes_work else None
        self._writing = threading.RLock()
        self._is_written = False  # in full

    def begin(self) -> None:
        """Look on from the moment that the process asks for a device."""
        torch.cuda._lazy_call(self._begin_on_device)  # type: ignore[no-untyped-call]
        register_module_parameter_registration_hook(self._remember)
        register_module_module_registration_hook(self._remember)
        # In an optimizer that is compiled, hooks would be, too.
        before, after = map(torch.compiler.disable, (self._before_step, self._after_step))
        register_optimizer_step_pre_hook(lambda optimizer, *_: before(optimizer))
        register_optimizer_step_post_hook(lambda optimizer, *_: after(optimizer))
        self._begin_script()
        self._watch_graphs()
        if self._extra_step is not None:
            self._extra_step.begin()
        atexit.register(self._end)
        Finalize(None, self._end, exitpriority=0)  # of a process that multiprocessing has started: atexit is not run
        of_script = sys.excepthook

        def keep_and_call(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            self._note_error(error)
            of_script(kind, error, trace)

        sys.excepthook = keep_and_call

    @_harmless
    def _begin_script(self) -> None:
        self._script.begin()
        self._inputs.begin()

    @_harmless
    def _begin_on_device(self) -> None:
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=MOST_EVENTS)
        torch._C._cuda_attach_out_of_memory_observer(self._note_out_of_memory)  # type: ignore[attr-defined]
        reset = torch._C._cuda_resetPeakMemoryStats

        def keep_and_reset(device: int) -> None:  # as a script does that prints the peak of each step
            self._keep_peaks()
            if self._counts_probe:  # by a trial of the probe, or at its end; hooks of optimizers are not called there
                self._probed_us = _now_us()
            self._counts_probe = is_rehearsing()
            if self._counts_probe:
                self._retries_of_probe[device] = int(torch.cuda.memory_stats(device)["num_alloc_retries"])
            reset(device)

        torch._C._cuda_resetPeakMemoryStats = keep_and_reset
        self._counters.append(control.counters())
        self._starts.note(0)
        self._write(ended=False)
        threading.Thread(target=self._write_now_and_then, name="dry-run", daemon=True).start()

    # Steps

    @_harmless
    def _before_pass(self, number: int) -> None:
        """Stop a script whose optimizer is none of torch's, as its steps are not seen: before one pass too many."""
        if not _uses_device() or os.getpid() != self._process:
            return
        if number >= self._most_steps and not self._script.optimizers and not self._ends_us:
            self._stop()

    @_harmless
    def _after_pass(self) -> None:
        self._inputs.end_pass()
        if self._extra_step is not None:
            self._extra_step.start_if_due()
        if _uses_device() and not self._script.optimizers:  # whose steps would be the moments to look at
            self._label()

    @_harmless
    def _before_step(self, optimizer: Optimizer) -> None:
        if is_rehearsing():
            self._probed_us = _now_us()
            return
        self._script.before_step(optimizer)
        self._called_us[optimizer] = _now_us()
        self._counts.setdefault(optimizer, 0)
        if torch._C._current_graph_task_id() == -1:  # else a step within a backward pass, one for each parameter
            self._label()

    @_harmless
    def _after_step(self, optimizer: Optimizer) -> None:
        if not _uses_device() or os.getpid() != self._process:
            return
        now = _now_us()
        if is_rehearsing():
            self._probed_us = now
            return
        self._calls.append((self._called_us.get(optimizer, now), now))
        if self._script.is_idle(optimizer):
            if not self._ends_us and self._script.idle_in_row >= self._most_steps:
                self._stop()
            return
        self._script.note_step()
        if torch.cuda.is_current_stream_capturing():
            self._captures_step = True  # it is taken when the graph is replayed
            return
        count = self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        if count <= len(self._ends_us) or self._is_ending:  # of several optimizers, the first to step ends a step
            return
        if torch._C._current_graph_task_id() == -1:
            self._end_step()
        else:  # an optimizer for each parameter, in the backward pass
            self._is_ending = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_step)

    @_harmless
    def _end_step(self) -> None:
        self._is_ending = False
        if self._stopped:
            self._stop_with_work()
        self._label()
        self._ends_us.append(_now_us())
        self._counts_probe = False
        self._starts.note(torch.cuda.memory_allocated())
        self._counters.append(control.counters())
        self._write(ended=False)
        if len(self._ends_us) >= self._most_steps:
            if self._extra_step is None:
                self._stop()
            else:
                self._conclude()
                self._extra_step.start()

    @_harmless
    def _watch_graphs(self) -> None:
        """Count a step that a graph has captured each time that the graph is replayed, in which no hook is called."""
        end, replay = torch.cuda.CUDAGraph.capture_end, torch.cuda.CUDAGraph.replay

        @functools.wraps(end)
        def end_and_note(graph: torch.cuda.CUDAGraph) -> None:
            end(graph)
            if self._captures_step:
                self._captures_step = False
                self._graphs.add(graph)

        @functools.wraps(replay)
        def replay_and_count(graph: torch.cuda.CUDAGraph) -> None:
            replay(graph)
            if graph in self._graphs:
                self._end_step()

        torch.cuda.CUDAGraph.capture_end = end_and_note  # type: ignore[method-assign, assignment]
        torch.cuda.CUDAGraph.replay = replay_and_count  # type: ignore[method-assign, assignment]

    def _stop_with_work(self) -> None:
        try:
            if self._extra_step is not None:
                self._extra_step.end(_rank())
        finally:
            self._stop()

    def _conclude(self) -> None:
        """Write all that is known of memory: whatever follows does not change it."""
        self._stopped = True
        self._label()
        self._write(ended=True)
        torch.cuda.memory._record_memory_history(enabled=None)

    def _stop(self) -> None:
        """End the process: what there is to know of it is known."""
        torch.cuda.synchronize()  # other processes may wait for a collective of this one
        if not self._stopped:
            self._conclude()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    # Memory

    def _remember(self, module: nn.Module, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._modules.add(module)

    def _label(self) -> None:
        """Note which memory holds weights, gradients and states now; the allocator's history knows addresses alone."""
        labels: dict[int, str] = {}
        seen: set[nn.Module] = set()
        modules = [part for module in list(self._modules) for _, part in module.named_modules(memo=seen)]
        of_modules = [p for module in modules for p in module.parameters(recurse=False)]
        of_optimizers = [p for optimizer in self._counts for group in optimizer.param_groups for p in group["params"]]
        for parameter in (*of_modules, *of_optimizers):
            _add(labels, parameter, WEIGHTS)
            if parameter.is_leaf and parameter.grad is not None:
                _add(labels, parameter.grad, GRADIENTS)
        for value in tree_leaves([dict(optimizer.state) for optimizer in self._counts]):
            if isinstance(value, torch.Tensor):
                _add(labels, value, STATES)
        self._labels.append(Labels(_now_us(), labels))

    @_harmless
    def _keep_peaks(self) -> None:
        if not _uses_device() or self._counts_probe:
            return
        for device in range(torch.cuda.device_count()):
            stats = torch.cuda.memory_stats(device)
            if not stats.get("reserved_bytes.all.peak") and not self._out_of_memory:
                continue
            peaks = self._peaks.setdefault(device, {})
            for name, key in (("allocated", "allocated_bytes.all.peak"), ("reserved", "reserved_bytes.all.peak")):
                peaks[name] = max(peaks.get(name, 0), int(stats[key]))
            peaks["retries"] = int(stats["num_alloc_retries"]) - self._retries_of_probe.get(device, 0)
            self._reserved_now[device] = int(stats["reserved_bytes.all.current"])

    @_harmless
    def _note_out_of_memory(self, device: int, asked: int, total: int, free: int) -> None:
        """Keep what is known of an allocation that fails, from within it."""
        own = stack_of(sys._getframe().f_back)  # none in a backward pass's own thread
        is_main = threading.current_thread() is threading.main_thread()
        main = threading.main_thread().ident or 0
        stack = own if is_main else stack_of(sys._current_frames()[main])  # which waits for the backward pass
        stats = torch.cuda.memory_stats(device)
        allocated, reserved = (int(stats[f"{name}_bytes.all.current"]) for name in ("allocated", "reserved"))
        allowed = int(total * torch.cuda.get_per_process_memory_fraction(device)) - reserved
        shortage = Shortage(asked, max(min(free, allowed), 0), allocated, reserved)
        setting = allocator_advice(torch.device("cuda", device))
        self._label()
        if is_rehearsing():
            self._probed_us = _now_us()
        self._out_of_memory.append({
            "device": device, "asked_bytes": asked, "step": len(self._ends_us) + 1, "time_us": _now_us(),
            "in_probe": is_rehearsing(),
            "in_backward": any(frame["name"] == "_engine_run_backward" for frame in stack),
            "in_training": torch.is_grad_enabled() or any(_OF_TRAINING.search(frame["filename"]) for frame in stack),
            "passes": self._script.passes, "started": control.started_and_waited()[0],
            "line": line_of_script(stack), "where": place(own), "stack": [line_of(f) for f in stack[:MOST_FRAMES]],
            "allocated_bytes": allocated, "reserved_bytes": reserved, "free_bytes": shortage.free,
            "causes": [cause_of(shortage, self._starts, None, setting), self._inputs.larger(asked)],
        })  # fmt: skip
        self._write(ended=False)

    # What is written

    @_harmless
    def _note_error(self, error: BaseException) -> None:
        """Keep the error that ends the script, also of one that has not come to use the device."""
        self._error = describe_error(error)
        if os.getpid() == self._process and not _uses_device():
            self._write(ended=False)

    @_harmless
    def _end(self) -> None:
        if _uses_device() and os.getpid() == self._process:
            self._label()
            self._write(ended=True)

    def _write_now_and_then(self) -> None:
        while not self._is_written:
            time.sleep(EVERY)
            self._write_in_short()

    @_harmless
    def _write_in_short(self) -> None:
        self._write(ended=False)

    def _write(self, *, ended: bool) -> None:
        """Write what is known, all at once: in short while the script runs, which may be killed, in full at its end."""
        with self._writing:
            if self._is_written:
                return
            self._is_written = ended
            if ended and not self._ends_us:  # a script that has not come further than its probe
                self._counts_probe = False
            self._keep_peaks()
            device = max(self._peaks, key=lambda index: self._peaks[index]["reserved"], default=0)
            steps = [asdict(end - begin) for begin, end in zip(self._counters, self._counters[1:], strict=False)]
            notes: dict[str, Any] = {
                "process": self._process, "rank": _rank(), "device": device, "steps": steps,
                "peaks": self._peaks.get(device, {}), "out_of_memory": self._out_of_memory,
                "reserved_now": {control.card_of(at): size for at, size in self._reserved_now.items()},
                "card": control.card_of(device), "taken": control.most_taken(device),
                "started": control.started_and_waited()[0], "largest_input": self._inputs.largest(),
                "lacks": self._without_workspaces(),
                "error": self._error, "trouble": self.trouble, "stopped": self._stopped,
                "script": self._script.as_object(),
            }  # fmt: skip
            if ended:
                notes["script"]["trains"] = any(
                    module.training and any(weight.requires_grad for weight in module.parameters())
                    for module in list(self._modules)
                )
                notes["history"] = self._read_history(device)
            write_process(self._folder, notes)

    def _without_workspaces(self) -> list[str]:
        """Return what ran that cuDNN would take workspaces for, which are missing here."""
        recurrent = any(isinstance(module, nn.RNNBase) for module in list(self._modules))
        return [*sorted(ran), *(["recurrent layers"] if recurrent else [])]

    def _read_history(self, device: int) -> dict[str, Any]:
        gc.disable()  # the process ends; a collection would look at all of a million events, again and again
        failed = self._out_of_memory[-1] if self._out_of_memory else None
        traces = torch.cuda.memory._snapshot()["device_traces"]
        of_device = traces[device] if device < len(traces) else []
        until = failed["time_us"] if failed is not None and failed["step"] > len(self._ends_us) else None
        moments = Moments(self._calls, self._ends_us, until, since=self._probed_us if self._ends_us else None)
        history = read_history(of_device, self._labels, moments, workspace_bytes(device))
        frames = history.peak_frames
        return {
            "peak_step": step_of(history.peak_us, self._ends_us), "peak_line": line_of_script(frames),
            "peak_where": place(frames), "categories": history.categories, "holders": history.holders,
            "outdated_buckets_bytes": history.outdated_buckets_bytes,
            "points": history.points,
            "steps_end": [bisect(of_device, end, key=lambda event: event["time_us"]) for end in self._ends_us],
        }  # fmt: skip


def _uses_device() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", 0))


def _now_us() -> int:
    return time.time_ns() // 1000


def _add(labels: dict[int, str], tensor: torch.Tensor, category: str) -> None:
    try:
        storages = get_untyped_storages(tensor)
    except Exception:  # whatever a subclass of tensors makes of it: what is not known has no name
        return
    for storage in storages:
        if storage.device.type == "cuda":
            labels[storage.data_ptr()] = category
