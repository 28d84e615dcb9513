"""The error that ends a process of a script, also one that has not come to import torch."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from adaptive_batching._dry_run import FOLDER
from adaptive_batching._dry_run.history import is_of_script, line_of_script

MOST_TEXT = 300  # of an error


def start() -> None:
    """Have an error be written down that ends this process before torch is imported, from when on `watch` does it."""
    of_python = sys.excepthook

    def keep_and_call(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if "torch" not in sys.modules:
            with contextlib.suppress(Exception):  # a report watches, and breaks nothing
                _write(describe_error(error))
        of_python(kind, error, trace)

    if FOLDER in os.environ:
        sys.excepthook = keep_and_call


def note(text: str) -> None:
    """Write down why this process ends, which has come to nothing yet."""
    _write({"text": text, "is_of_host_memory": False, "line": None, "is_of_script": False})


def _write(error: dict[str, Any]) -> None:
    values = {"process": os.getpid(), "peaks": {}, "steps": [], "error": error}
    write_process(Path(os.environ[FOLDER]), values)


def describe_error(error: BaseException) -> dict[str, Any]:
    """Return an error's text, the line of the script that it comes from, and if the host's memory ran out."""
    on_host = isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)
    lines = str(error).strip().splitlines()
    text = ": ".join([type(error).__name__, *lines[:1]])
    if type(error).__name__ == "DistBackendError" and len(lines) > 1:  # what NCCL says stands last
        text = f"{type(error).__name__}: {lines[-1].strip()}"
    frames: list[dict[str, Any]] = [
        {"filename": f.filename, "line": f.lineno, "name": f.name}
        for f in reversed(traceback.extract_tb(error.__traceback__))
    ]
    if type(error).__name__ == "ProcessRaisedException":  # of spawn, which ends with the traceback of the script
        text, frames = lines[-1], []
    return {
        "text": text[:MOST_TEXT], "is_of_host_memory": on_host, "line": line_of_script(frames),
        "is_of_script": bool(frames) and is_of_script(frames[0]),
    }  # fmt: skip


def write_process(folder: Path, values: dict[str, Any]) -> None:
    """Write what is known of a process to its file, all at once."""
    partial = folder / f".{values['process']}"
    partial.write_text(json.dumps(values))
    partial.replace(folder / f"{values['process']}.json")
