"""The answer of a dry run in words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adaptive_batching._dry_run.answer import DryRun
from adaptive_batching._dry_run.time.forecast import NO_LENGTH, RunLength
from adaptive_batching._dry_run.times import time_in_words
from adaptive_batching._dry_run.verdict import Answer
from adaptive_batching._values import DRY_RUN, memory_size, plural

SHOWN = 2**16  # bytes that are told of a kind
MOST_FRAMES = 8  # of a stack that words show
_PLUMBING = "modules/module.py:"  # how torch calls a module
_ASKED = {"kernels": "kernels", "products": "matrix products", "synchronizations": "synchronizations",
          "collectives": "collectives"}  # fmt: skip
_OF_ZEROS = ("ZeroDivisionError", "OverflowError", "ValueError: math domain", "ValueError: expected a positive")
"""Errors of arithmetic, in Python's words, that a loss of zero leads to."""
_COPIES = ("copies_to_device", "copies_to_host", "copies_within")


def in_words(run: DryRun, length: RunLength = NO_LENGTH) -> list[str]:
    """Return the answer in lines."""
    worst, seconds = run.worst, f"{run.ending.seconds:.0f} s"
    steps = plural(run.steps, "step")
    if run.passes and not run.steps:
        steps = f"{run.passes} backward pass{'' if run.passes == 1 else 'es'}"
    if run.answer is Answer.CANNOT_TELL:
        lines = [f"{run.answer}: {run.why_not} ({steps}, {seconds})"]
    elif run.answer is Answer.DOES_NOT_FIT and run.failure is not None:
        lines = [f"{run.answer}: {run.card}, out of memory in step {run.failure['step']} ({seconds})"]
        lines += _failure(run.failure)
    else:
        lines = [f"{run.answer}: {run.card}, {steps} ({seconds})"]
    if worst is None:
        return lines
    lines += peak_in_words(run)
    if worst["steps"]:
        step = worst["steps"][-1]
        asked = [f"{word} {step[name]:,}" for name, word in _ASKED.items()]
        lines.append(_row("a step", ", ".join([*asked, f"copies {sum(step[name] for name in _COPIES):,}"])))
    if run.forecast is not None:
        lines += [_row(*line) for line in time_in_words(run.forecast, length)]
    elif run.lacks_time:
        lines.append(_row("time", f"not known: {run.why_no_time}"))
    if run.failure is None:
        lines += _how_it_ended(run)
    if run.kept:
        more = f" and {len(run.kept) - 1} more" if len(run.kept) > 1 else ""
        lines.append(_row("kept", f"{run.kept[0]}{more}, which the script would have overwritten or removed"))
    if run.survived:
        times = "once" if run.survived == 1 else f"{run.survived} times"
        lines.append(_row("survived", f"ran out of memory {times} and went on"))
    if run.answer in (Answer.FITS, Answer.TIGHT):
        if largest := worst.get("largest_input"):
            lines.append(_row("input", f"{largest['name']} was at most {largest['size']}; a larger one takes more"))
        if lacks := worst.get("lacks"):
            lines.append(_row("not in it", f"workspaces of cuDNN, chosen on the card, for {' and '.join(lacks)}"))
    if worst["trouble"]:
        lines.append(_row("missing", f"parts of this report: {worst['trouble']}"))
    if run.answer is Answer.TIGHT:
        lines.append(_row("tight", _why_tight(run)))
    return lines


def _row(name: str, text: str) -> str:
    return f"  {name:<10}{text}"


def _failure(failure: dict[str, Any]) -> list[str]:
    during = " in the backward pass" if failure["in_backward"] else ""
    lines = [_row("failed", f"{memory_size(failure['asked_bytes'])} asked for{during}")]
    stack = [line for line in failure["stack"] if not line.startswith(_PLUMBING)]
    shown = [*stack[: MOST_FRAMES - 1], f"... {len(stack) - MOST_FRAMES} more", stack[-1]]
    causes = [cause for cause in failure["causes"] if cause is not None]
    lines += [_row("", f"  {line}") for line in (stack if len(stack) <= MOST_FRAMES else shown)]
    return lines + ([_row("because", "; and ".join(causes))] if causes else [])


def peak_in_words(run: DryRun) -> list[str]:
    """Return the peak of a run that has used a device, and what held it, in lines."""
    worst = run.worst
    assert worst is not None
    peaks, history = worst["peaks"], worst.get("history")
    which = f"rank {worst['rank']} of {len(run.processes)}, " if len(run.processes) > 1 else ""
    both = f"{memory_size(peaks['allocated'])} allocated, {memory_size(peaks['reserved'])} reserved"
    lines = [_row("peak", f"{which}{both}; {memory_size(max(run.left_bytes, 0))} of the card left")]
    if len(run.sharing) > 1:
        lines.append(_row("shared", f"by {len(run.sharing)} processes, that are all on card {worst['card']}"))
    if history is None:
        return lines
    if not run.failure:
        places = dict.fromkeys(filter(None, (history["peak_where"], history["peak_line"])))
        step, last = history["peak_step"], len(worst["steps"])
        when = f"after step {last}" if last and step > last else f"in step {step}"
        lines.append(_row("reached", f"{when}, {', from '.join(places)}"))
    shown = {kind: size for kind, size in history["categories"].items() if size >= SHOWN or size == peaks["allocated"]}
    lines.append(_row("held by", ", ".join(f"{kind} {memory_size(size)}" for kind, size in shown.items())))
    for holder in history["holders"][:5]:
        times = f" ({holder['allocations']:,} allocations)" if holder["allocations"] > 1 else ""
        lines.append(_row("", f"{memory_size(holder['bytes']):>11}  {holder['category']}, {holder['where']}{times}"))
    if outdated := history.get("outdated_buckets_bytes"):
        lines.append(_row("note", f"{memory_size(outdated)} are the buckets that DDP began with: NCCL frees them when"))
        lines.append(
            _row("", "its watchdog has run, every 100 ms; the longer steps of a real card may not hold both sets")
        )
    return lines


def _how_it_ended(run: DryRun) -> list[str]:
    """Return how the script came to its end, as far as that says what the answer is worth, and what to do."""
    scripts = [process["script"] for process in run.training]
    is_answered = run.answer is not Answer.CANNOT_TELL
    lines = []
    if is_answered and not run.steps:
        kept = (
            "the states of another optimizer count if they existed by then"
            if run.passes
            else "the script ran to its end"
        )
        lines.append(_row("no step", f"no optimizer of torch.optim took one; {kept}"))
    if is_answered and run.steps and not run.was_stopped:
        lines.append(_row("ended", f"by itself, after {plural(run.steps, 'step')}"))
    if is_answered and run.was_stopped:
        lines.append(_row("not run", "what follows, such as an evaluation or a checkpoint; --whole runs all of it"))

    # A loss of zero can end a script, or have it leave out the steps.
    if run.condition is not None:
        lines.append(
            _row("ended by", f"{run.condition}, a condition on a value of the device; losses are zero in a dry run")
        )
        lines.append(_row("to do", f"leave it out where os.environ has {DRY_RUN}"))
    elif not is_answered and run.ending.exit_code == 0 and not run.ending.interrupted and run.worst is not None:
        read = next((script["last_read"] for script in scripts if script["last_read"]), None)
        exit_line = next((script["exit"] for script in scripts if script["exit"]), None)
        if not run.was_stopped:
            last = "" if read is None else f"; the last line to read a value, which is zero in a dry run, was {read}"
            lines.append(_row("ended by", (exit_line or "the end of the script") + last))
        if any("history" in why for script in scripts for why in script["idle"].values()):
            todo = "measure with SGD, and add the history"
        elif any(script["optimizers"] for script in scripts):
            todo = "give it the data of a whole step, with all batches whose gradients it accumulates"
        else:
            todo = "call model.eval() if it does not train"
        lines.append(_row("to do", todo))

    by_check = any(error["is_of_script"] and _reads_value(error["line"], scripts) for error in run.errors)
    if by_check or any(error["text"].startswith(_OF_ZEROS) for error in run.errors):
        lines.append(
            _row("note", "losses are zero in a dry run: a script that divides by one, or checks one, fails here")
        )
    return lines


def _reads_value(line: str | None, scripts: Sequence[dict[str, Any]]) -> bool:
    """True if a value of the device was read at the line that raised an error."""
    at = {f"{Path(file).name}:{number}" for script in scripts for file, number in script["reads"]}
    return line is not None and line.split()[0] in at


def _why_tight(run: DryRun) -> str:
    if run.retries:
        times = "once" if run.retries == 1 else f"{run.retries} times"
        return f"the allocator had to empty its cache {times}, which is slow"
    most = memory_size(run.card.context_bytes + run.needed_besides)
    return f"CUDA's context and NCCL may take up to {most} on a real card"
