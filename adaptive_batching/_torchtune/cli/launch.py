"""Run a recipe from its file: the command line, log lines for people, and errors in one line."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torchtune import config
from torchtune.config._utils import _merge_yaml_and_cli_args

import adaptive_batching
from adaptive_batching._config import as_overrides
from adaptive_batching._growth.increase import IncreaseFunctionError
from adaptive_batching._memory.out_of_memory import is_out_of_memory
from adaptive_batching._mistakes import Mistake, end
from adaptive_batching._ranks.agree import is_lost_rank
from adaptive_batching._torchtune.names import config_on_command_line
from adaptive_batching._torchtune.recipe_classes import recipe
from adaptive_batching._torchtune.stock import compiling
from adaptive_batching._torchtune.train.growing import resolve_increase
from adaptive_batching._torchtune.train.settings import read_settings, read_validation
from adaptive_batching._torchtune.train.stock_config import (
    check_components,
    check_kinds,
    refused_in_one_line,
    set_up_in_one_line,
)
from adaptive_batching._torchtune.train.validating import check_validation
from adaptive_batching._values import AdaptiveBatchingError, ConfigError, first_line

log = logging.getLogger(__name__)

QUIET, VERBOSE, ONLY_PROBES = "-q", "-v", "--only-probe"
"""Flags of a recipe's command line, besides what torchtune reads."""

# Where memory ran out, and what to do.
_BEFORE_TRAINING = (
    "before training, where the model and its data are set up",
    ". What takes less: dtype=bf16, LoRA or QLoRA, a smaller model; 'adaptive-batching plan', with the config and "
    "overrides of this run, says what fits",
)
_IN_TRAINING = (
    "outside a forward or backward pass, where nothing can run again",
    "; checkpoints saved before are intact. Leave more memory: raise adaptive_batching.headroom, or set a smaller "
    "batch_size",
)
_IN_STOCK = (
    "in training",
    "; set adaptive_batching.recover_from_oom=True to have such a step run again in smaller parts, or a smaller "
    "batch_size",
)
_LATER = 60  # seconds
_RANK = int(os.environ.get("RANK", 0))
_NOT_OF_THE_USER = [
    str(Path(adaptive_batching.__file__).parent),
    *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
]


def entry_point(recipe_class: type[Any]) -> Callable[[], Any]:
    """Return the main function of the file of a recipe, which reads the command line as torchtune does."""

    def main() -> Any:
        begun = []
        if (here := str(Path.cwd())) not in sys.path:  # where a config's own modules are, also of torchrun's processes
            sys.path.append(here)
        flags = {argument for argument in sys.argv[1:] if argument in (QUIET, VERBOSE, ONLY_PROBES)}
        sys.argv = [argument for argument in sys.argv if argument not in flags]

        def recipe_main(cfg: DictConfig) -> None:
            begun.append(cfg)
            _run(recipe_class, cfg, flags)

        recipe_main.__doc__ = recipe_class.__doc__
        if not config_on_command_line() and not {"-h", "--help"} & {*sys.argv}:  # argparse would print its usage, too
            _end("--config <path> is missing; write it after the recipe", 2)
        try:
            return config.parse(recipe_main)()
        except Exception as error:
            if begun:
                raise
            _end(_mistake(error), 2)

    return main


def _mistake(error: Exception) -> str:
    """Say in one line why a command line cannot be read, which ``tune run`` has not checked."""
    config_path = config_on_command_line()
    if isinstance(error, FileNotFoundError):
        remedy = "'tune run' knows only torchtune's by name; use 'adaptive-batching run', or give the path of its file"
        return f"there is no config {config_path!r}; {remedy}"
    if meant := as_overrides(sys.argv[1:]):
        return f"a setting of a config has no dashes: write {' '.join(meant)}"
    what = f"{_what_cannot_be_read()} cannot be read ({first_line(error)})"
    return f"{what}; write key=value, with a value of the same kind as in the config"


def _what_cannot_be_read() -> str:
    """Name the first override on the command line that cannot be read by itself, or what else it may be."""
    config_path = config_on_command_line()
    try:
        values = argparse.Namespace(**OmegaConf.to_container(OmegaConf.load(config_path), resolve=False))  # type: ignore[arg-type]
    except Exception:  # whatever is wrong with it
        return f"the config {config_path!r}"
    for override in (argument for argument in sys.argv[1:] if "=" in argument):
        try:
            _merge_yaml_and_cli_args(values, [override])
        except Exception:
            return override
    return "the command line"


def run_recipe(recipe_class: type[Any], cfg: DictConfig) -> None:
    """Set a recipe up and train it, as the ``recipe_main`` of a stock recipe.

    A mistake ends in one line that names key, value and remedy, after the frames of the user's own code if it raised.

    Args:
        recipe_class: The recipe. Its ``prepare`` is called with the config before it is made.
        cfg: Its config.

    Raises:
        SystemExit: With that line.
    """
    _run(recipe_class, cfg, set())


def _run(recipe_class: type[Any], cfg: DictConfig, flags: set[str]) -> None:
    _log_for_people(flags)
    with compiling.limits_restored():
        with mistakes_in_one_line(*_BEFORE_TRAINING):
            if ONLY_PROBES in flags and cfg.get("micro_batch_size") not in ("auto", "explore"):  # which ask for a probe
                cfg.use_maximum_batch_size = True
            _check_device(cfg)
            _check_training(cfg, recipe_class)  # before the config is shown and pushes errors out of sight
            recipe_class.prepare(cfg)
            recipe = _set_up(recipe_class, cfg, flags)
        with mistakes_in_one_line(*(_IN_TRAINING if recipe.is_on else _IN_STOCK)):
            if ONLY_PROBES not in flags:
                recipe.train()
            recipe.ranks.leave()
            recipe.cleanup()


def _check_device(cfg: DictConfig) -> None:
    """Refuse a CUDA device that is not there: stock says that it lacks bf16."""
    asked = str(cfg.get("device"))
    if asked.partition(":")[0] == "cuda" and not torch.cuda.is_available():
        build = "" if torch.version.cuda else ", and torch is built without CUDA"
        raise ConfigError(
            f"device={asked}: no GPU is found here{build}; add device=cpu dtype=fp32 to train on the CPU, or ask "
            f"'adaptive-batching plan' what the config takes on a GPU"
        )


def check_settings(cfg: DictConfig, name: str | None) -> None:
    """Refuse what the settings of a config ask for in vain, as its recipe does before it loads anything.

    Args:
        cfg: The config.
        name: Of the recipe; None if it is not known, for what holds in all that train.

    Raises:
        AdaptiveBatchingError: On the first mistake.
    """
    if name is not None:
        read_settings(cfg, warns=False, is_distributed=name.endswith("_distributed"))
    _check_training(cfg, None if name is None else recipe(name))


def _check_training(cfg: DictConfig, recipe_class: type[Any] | None) -> None:
    check_kinds(cfg)
    check_components(cfg)
    increase = resolve_increase(read_settings(cfg, warns=False))
    check_validation(read_validation(cfg, warns=False), increase, recipe_class)
    if recipe_class is not None:
        recipe_class.check_settings(cfg)


def _set_up(recipe_class: type[Any], cfg: DictConfig, flags: set[str]) -> Any:
    if VERBOSE in flags:
        config.log_config(recipe_name=recipe_class.__name__, cfg=cfg)
    with refused_in_one_line():
        recipe = recipe_class(cfg=cfg)
    with set_up_in_one_line(cfg):
        recipe.setup(cfg=cfg)
    return recipe


@contextlib.contextmanager
def mistakes_in_one_line(where: str, remedy: str = "") -> Iterator[None]:
    """End the process in one line on what :func:`in_one_line` has one for.

    Mistakes of the user end with status 2, and what else can end a run with 1.
    """
    try:
        yield
    except Exception as error:
        if (line := in_one_line(error, where, remedy)) is None:
            raise
        if isinstance(error, (AdaptiveBatchingError, OmegaConfBaseException)):
            sys.stderr.write(_frames_of_the_user(error))
        else:
            log.debug("in full:", exc_info=error)
        is_mistake = isinstance(error, (ConfigError, IncreaseFunctionError, OmegaConfBaseException))
        _end(line, 2 if is_mistake else 1, follows=is_lost_rank(error))


def in_one_line(error: Exception, where: str, remedy: str = "") -> str | None:
    """Say why a run has ended; None for an error whose traceback says more.

    ``where`` memory has run out, if it has, and the ``remedy`` for that, follow in the line.
    """
    if isinstance(error, AdaptiveBatchingError):
        return str(error)
    if isinstance(error, OmegaConfBaseException):
        return (
            f"the config lacks a key, or belongs to another recipe ({first_line(error).rstrip('.')}); add it, or take "
            "a config of this recipe"
        )
    if is_lost_rank(error):
        return (
            "lost the connection to another rank: it has ended, and its last line says why. If it is still running, "
            "check the network between the hosts"
        )
    if is_out_of_memory(error):
        return f"out of memory {where} ({first_line(error)}){remedy}"
    return None


def _end(line: str, code: int, *, follows: bool = False) -> NoReturn:
    """End this process with ``line``; with ``follows``, it is another rank's end that has led to this one.

    A process that torchrun has started leaves the line to its launcher, which prints that of the rank that was first to
    fail: ours prints the line alone, torchrun and `tune run` in their summary. torch makes a `ChildFailedError` of a
    process that ends with another status than 0 (`SubprocessContext` in `elastic/multiprocessing/api.py`).
    """
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        at = int(time.time()) + (_LATER if follows else 0)
        said = {"message": f"error: {line}", "extraInfo": {"timestamp": str(at)}}
        with contextlib.suppress(OSError):
            Path(file).write_text(json.dumps({"message": said}))
            raise Mistake(f"error: {line}", code) from None
    end(line, code)


class _ForPeople(logging.Formatter):
    """Messages as they are; the level only where it matters, and the rank where it is not the first."""

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        return level + ("" if _RANK == 0 else f"rank {_RANK}: ") + super().format(record)


def _log_for_people(flags: set[str]) -> None:
    """Show our log on the first rank, and on others what only they know, unless the program has set logging up."""
    if QUIET in flags:
        logging.disable(logging.INFO)  # stock sets the level of its loggers each time that it logs
    if logging.getLogger().handlers:
        return
    logger = logging.getLogger("adaptive_batching")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(_ForPeople("%(message)s"))
        if _RANK > 0:
            handler.addFilter(lambda record: hasattr(record, "only_here") or record.levelno > logging.WARNING)
        logger.addHandler(handler)
    shown = logging.DEBUG if VERBOSE in flags else logging.INFO
    logger.setLevel(shown if _RANK == 0 else logging.WARNING)


def _frames_of_the_user(error: BaseException) -> str:
    """Return the frames of code that is neither ours nor installed, from the errors that led to ``error``."""
    lines: list[str] = []
    while (cause := error.__cause__) is not None:
        frames = traceback.extract_tb(cause.__traceback__)
        shown = [frame for frame in frames if not frame.filename.startswith(("<", *_NOT_OF_THE_USER))]
        if shown:
            lines += [*traceback.format_list(shown), f"{type(cause).__name__}: {cause}\n"]
        error = cause
    return "".join(lines)
