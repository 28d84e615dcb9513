"""Notes on what a script does: its optimizers, its backward passes, and the values of the device that it reads.

All values are zero on the emulated device. A script that trains until its loss is small, or leaves out a batch whose
loss is zero, therefore does something else than on a card, and where it has read a value tells what.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from adaptive_batching._dry_run.history import is_of_script, line_of_script
from adaptive_batching._values import memory_size

MOST_LINES = 200  # that read values and are remembered
_WATCHERS = str(Path(__file__).parent)
_READERS = ("_local_scalar_dense", "_to_copy")  # item(), float(), if loss < 1; and cpu(), tolist(), numpy()

Lines = list[tuple[str, int]]
"""Files and lines of a script."""


class ScriptNotes:
    """Notes what a process of a script does; it changes nothing.

    Args:
        before_pass: Called before a backward pass, with the number of those before.
        after_pass: Called after one.
    """

    def __init__(self, before_pass: Callable[[int], None], after_pass: Callable[[], None]) -> None:
        self.optimizers: list[str] = []
        """Classes of `torch.optim` optimizers that were made, each with its line."""
        self.passes = 0
        """Backward passes on the device."""
        self.reads: dict[tuple[str, int], None] = {}
        """Lines on the stack when values were read."""
        self.last_read: str | None = None
        self.exit: str | None = None
        """The line that asked to end the process."""
        self.of_steps: Lines = []
        """Lines on the stack of the last step."""
        self.idle: dict[str, str] = {}
        """Optimizers that took a step on nothing, and why it was nothing."""
        self.idle_in_row = 0
        self.stopped_early: str | None = None
        """The callback that ended training for want of progress, with the script's line."""
        self._watches_callbacks = False
        self._before_pass, self._after_pass = before_pass, after_pass
        self._had_gradients: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self._kept: list[Any] = []  # what is registered stays for as long as its library is referred to

    def begin(self) -> None:
        self._watch_optimizers()
        self._watch_passes()
        self._watch_reads()
        for owner, name in ((sys, "exit"), (builtins, "exit"), (builtins, "quit")):
            if hasattr(owner, name):
                setattr(owner, name, self._noting_exit(getattr(owner, name)))

    def _watch_optimizers(self) -> None:
        of_torch = Optimizer.__init__

        @functools.wraps(of_torch)
        def make_and_note(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            of_torch(optimizer, *args, **kwargs)
            with contextlib.suppress(Exception):
                line = line_of_script(stack_of(sys._getframe(1)))
                self.optimizers.append(type(optimizer).__name__ + ("" if line is None else f", {line}"))

        Optimizer.__init__ = make_and_note  # type: ignore[method-assign, assignment]

    def _watch_passes(self) -> None:
        run: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

        @functools.wraps(run)
        def note_and_run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            is_outermost = torch._C._current_graph_task_id() == -1
            if is_outermost and not is_rehearsing() and all(type(x) is torch.Tensor or _is_sharded(x) for x in outputs):
                self._before_pass(self.passes)
                result = run(outputs, *args, **kwargs)
                self.passes += 1
                self._after_pass()
                return result
            return run(outputs, *args, **kwargs)

        torch.autograd._engine_run_backward = note_and_run  # type: ignore[attr-defined, assignment]

    def _watch_reads(self) -> None:
        library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        for name in _READERS:
            kernel = torch.library.get_kernel(f"aten::{name}", "CUDA")
            library.impl(name, self._noting_read(kernel), "CUDA", with_keyset=True)
        self._kept.append(library)

    def _noting_read(self, kernel: Any) -> Callable[..., Any]:
        def read(keys: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            result = kernel.call_boxed(keys, tensor, *args, **kwargs)
            if not isinstance(result, torch.Tensor) or result.device.type == "cpu":
                with contextlib.suppress(Exception):  # a report watches, and breaks nothing
                    self._note_read(tensor)
            return result

        return read

    def _note_read(self, tensor: torch.Tensor) -> None:
        is_count = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
        if is_count or threading.current_thread() is not threading.main_thread() or is_rehearsing():
            return
        stack = stack_of(sys._getframe(2))
        lines = lines_of_script(stack)
        if len(self.reads) < MOST_LINES:
            self.reads.update(dict.fromkeys(lines))
        self.last_read = line_of_script(stack) or self.last_read

    def _noting_exit(self, leave: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(leave)
        def note_and_leave(*args: Any) -> Any:
            self.exit = line_of_script(stack_of(sys._getframe(1))) or self.exit
            return leave(*args)

        return note_and_leave

    def _watch_early_stopping(self) -> None:
        """Note when transformers' callback ends training, once that is imported: it compares metrics."""
        callbacks: Any = sys.modules.get("transformers.trainer_callback")
        if callbacks is None or self._watches_callbacks:
            return
        self._watches_callbacks = True
        evaluate = callbacks.EarlyStoppingCallback.on_evaluate

        @functools.wraps(evaluate)
        def evaluate_and_note(callback: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            result = evaluate(callback, args, state, control, **kwargs)
            if control.should_training_stop:
                line = line_of_script(stack_of(sys._getframe(1)))
                self.stopped_early = type(callback).__name__ + ("" if line is None else f", {line}")
            return result

        callbacks.EarlyStoppingCallback.on_evaluate = evaluate_and_note

    def before_step(self, optimizer: Optimizer) -> None:
        self._watch_early_stopping()
        self._had_gradients[optimizer] = _has_gradients(optimizer)

    def is_idle(self, optimizer: Optimizer) -> bool:
        """Return if a step that is over was one on nothing, and remember it."""
        why = None
        of_torch = type(optimizer).__module__.startswith("torch.optim.")  # another may do without gradients
        if of_torch and not self._had_gradients.get(optimizer, True) and not _has_gradients(optimizer):
            why = "no parameter had a gradient"
        elif isinstance(optimizer, LBFGS) and not any(state.get("n_iter", 0) for state in optimizer.state.values()):
            group = optimizer.param_groups[0]
            size = sum(parameter.nbytes for parameter in group["params"])
            history = memory_size(2 * group["history_size"] * size)
            why = f"its gradient is zero here, and it stopped before it made its history, which takes up to {history}"
        if why is None:
            self.idle_in_row = 0
            return False
        self.idle_in_row += 1
        line = line_of_script(_stack_of_main())
        self.idle[type(optimizer).__name__ + ("" if line is None else f" ({line})")] = why
        return True

    def note_step(self) -> None:
        self.of_steps = lines_of_script(_stack_of_main())

    def as_object(self) -> dict[str, Any]:
        return {
            "optimizers": self.optimizers[:10], "passes": self.passes, "reads": [*self.reads],
            "last_read": self.last_read, "exit": self.exit, "of_steps": self.of_steps, "idle": dict(self.idle),
            "stopped_early": self.stopped_early,
        }  # fmt: skip


def is_rehearsing() -> bool:
    """True in a step of a probe of ours, which is undone and is no step of training."""
    trial = sys.modules.get("adaptive_batching._probe.trial")
    state = sys.modules.get("adaptive_batching._state")
    return (trial is not None and trial.probing) or (state is not None and state.rehearsing)


def stack_of(frame: Any) -> list[dict[str, Any]]:
    """Return the stack of a frame, the innermost first, without what watches it."""
    stack = []
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_WATCHERS):
            stack.append({"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name})
        frame = frame.f_back
    return stack


def _stack_of_main() -> list[dict[str, Any]]:
    """Return the stack of the main thread, which waits for a step that is taken in the backward pass."""
    return stack_of(sys._current_frames()[threading.main_thread().ident or 0])


def lines_of_script(stack: list[dict[str, Any]]) -> Lines:
    return [(str(Path(frame["filename"]).absolute()), frame["line"]) for frame in stack if is_of_script(frame)]


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def _is_sharded(tensor: Any) -> bool:
    return type(tensor).__name__ == "DTensor"
