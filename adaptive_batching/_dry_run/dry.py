"""Keep a dry run from leaving traces: nothing is sent, and what known libraries write goes to a folder that is removed.

Files that were there before are kept by the device's library (`source/guard.cpp`), whoever writes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from inspect import isfunction, ismethod
from pathlib import Path
from types import ModuleType
from typing import Any

from adaptive_batching._dry_run import SCRATCH

OFFLINE = {
    "WANDB_MODE": "disabled", "SWANLAB_MODE": "disabled", "COMET_MODE": "disabled", "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
}  # fmt: skip
"""Variables that keep trackers of experiments from sending anything."""

_READS = re.compile(
    "(list|get|fetch|parse|inspect|wait|search|verify|read|resolve|download|hf_hub|snapshot|auth|whoami|run_as_future)"
    ".*|.*_(info|exists)"
)
"""Names of methods that ask the Hub for something; others change it."""


def offline(scratch: Path) -> dict[str, str]:
    """Return variables of the environment with which trackers send nothing, and write to a folder at most."""
    return {**OFFLINE, "WANDB_DIR": str(scratch), "MLFLOW_TRACKING_URI": scratch.as_uri(), SCRATCH: str(scratch)}


def _scratch(path: Any) -> str:
    """Return the folder that stands in for one that a script names."""
    named = Path(os.fspath(path)).absolute()
    scratch = Path(os.environ[SCRATCH])
    if scratch in named.parents:
        return str(named)
    folder = scratch / named.relative_to(named.anchor)
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder)


def _wandb(module: Any) -> None:
    start = module.init

    @functools.wraps(start)
    def disabled(*args: Any, **kwargs: Any) -> Any:
        return start(*args, **{**kwargs, "mode": "disabled"})  # also where a script names another mode

    module.init = disabled


def _hub(module: Any) -> None:
    """Have what would change something on the Hub do nothing."""
    for name, method in list(vars(module.HfApi).items()):
        if isfunction(method) and not name.startswith("_") and not _READS.fullmatch(name):
            nothing = _sends_nothing(module, name)
            setattr(module.HfApi, name, nothing)
            if ismethod(getattr(module, name, None)):  # the same of an instance that the module has made
                setattr(module, name, functools.partial(nothing, None))


def _sends_nothing(module: Any, name: str) -> Callable[..., Any]:
    def nothing(api: Any, *args: Any, run_as_future: bool = False, **kwargs: Any) -> Any:
        repository = str(kwargs.get("repo_id") or (args[0] if args and isinstance(args[0], str) else "model"))
        url = f"{module.constants.ENDPOINT}/{repository if '/' in repository else f'dry-run/{repository}'}"
        result = module.RepoUrl(url) if name == "create_repo" else None
        if name in ("create_commit", "upload_file", "upload_folder"):
            result = module.CommitInfo(f"{url}/commit/0", commit_message="", commit_description="", oid="0")
        if not run_as_future:
            return result
        done: Future[Any] = Future()
        done.set_result(result)
        return done

    return nothing


def _event_files(module: Any) -> None:
    """Have files of TensorBoard be written elsewhere."""
    make = module.EventFileWriter.__init__

    @functools.wraps(make)
    def make_elsewhere(writer: Any, logdir: Any, *args: Any, **kwargs: Any) -> None:
        make(writer, _scratch(logdir), *args, **kwargs)

    module.EventFileWriter.__init__ = make_elsewhere


def _training_arguments(module: Any) -> None:
    """Have Trainer write to another folder, from which a run goes on with the checkpoints of its own."""
    check = module.TrainingArguments.__post_init__

    @functools.wraps(check)
    def check_and_move(arguments: Any) -> None:
        check(arguments)
        arguments.push_to_hub = False
        if arguments.output_dir is None:
            return
        named = Path(arguments.output_dir).absolute()
        arguments.output_dir = _scratch(named)
        for checkpoint in named.glob("checkpoint-*"):
            with contextlib.suppress(FileExistsError):  # of another rank
                (Path(arguments.output_dir) / checkpoint.name).symlink_to(checkpoint)

    module.TrainingArguments.__post_init__ = check_and_move


PREPARED: Mapping[str, Callable[[ModuleType], None]] = {
    "wandb": _wandb,
    "huggingface_hub.hf_api": _hub,
    "tensorboard.summary.writer.event_file_writer": _event_files,
    "tensorboardX.event_file_writer": _event_files,
    "transformers.training_args": _training_arguments,
}
"""Module name -> the function that patches the module once a script has imported it."""
