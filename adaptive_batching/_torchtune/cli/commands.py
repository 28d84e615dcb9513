"""The commands that stand on torchtune's: ``run``, ``probe``, ``validate`` and ``quickstart``."""

from __future__ import annotations

import argparse
import logging
import os
import re
import runpy
import shlex
import shutil
import site
import sys
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torchtune._cli.run import Run

import adaptive_batching
from adaptive_batching._mistakes import end
from adaptive_batching._torchtune.cli import quickstart
from adaptive_batching._torchtune.cli.configs import read_config
from adaptive_batching._torchtune.cli.launch import ONLY_PROBES, QUIET, VERBOSE, check_settings, in_one_line
from adaptive_batching._torchtune.names import (
    PLANNED,
    config_files,
    find_config,
    find_recipe,
    recipe_of,
    recipes,
    recipes_folder,
)
from adaptive_batching._torchtune.train.settings import FIELDS, VALIDATION, check_names
from adaptive_batching._torchtune.train.stock_config import check_components, check_kinds, refused_in_one_line
from adaptive_batching._values import ConfigError

# Loggers of torch's, each of a level of its own, that say in other words what a process has said
_TELL_OF_PROCESSES_THAT_ENDED = ("torch.distributed.elastic", "torch.distributed.elastic.multiprocessing.errors")
_LAUNCH = "[torchrun's options] RECIPE --config CONFIG [key=value ...]"
_FIELDS = """

key=value sets any key of the config, and the fields of this package:
  micro_batch_size=auto         run each batch without padding, in forward passes that fit; the gradient stays the same
  use_maximum_batch_size=True   find the largest batch that fits, before training
  batch_increase_function=...   grow the batch, by a function's dotted path
  adaptive_batching.KEY=value   the rest, such as memory_limit=20GiB

examples:
  {prog} lora_finetune_single_device --config llama3_2/1B_lora_single_device micro_batch_size=auto
  {prog} --nproc_per_node 2 lora_finetune_distributed --config llama3_2/1B_lora epochs=2

All options but -h, -q and -v are torchrun's."""


class _Subparsers:
    """Stands for argparse's subparsers before a command of torchtune, with our texts in the place of its own."""

    def __init__(self, subparsers: Any, prog: str, name: str, **texts: str) -> None:
        self._subparsers, self._name, self._texts = subparsers, name, {"prog": f"{prog} {name}", **texts}

    def add_parser(self, _: str, **texts: Any) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = self._subparsers.add_parser(self._name, **{**texts, **self._texts})
        return parser


def _say(parser: argparse.ArgumentParser, prog: str) -> None:
    """Have the help of a command of torchtune name ``prog`` in the place of ``tune``."""
    for part in (parser, *parser._actions):
        for name in ("usage", "epilog", "help"):
            if isinstance(text := getattr(part, name, None), str):
                setattr(part, name, re.sub(r"\btune (?=run\b)", f"{prog} ", text))


def add_run(subparsers: Any, prog: str) -> None:
    """Add ``run``."""
    text = "Run a recipe. torchrun's options go before the recipe, overrides (key=value) after the config."
    _add_launch(_Run, subparsers, prog, "run", text)


def add_probe(subparsers: Any, prog: str) -> None:
    """Add ``probe``."""
    text = (
        "Find the largest batch of a config on this machine, and stop before training. A run of the same config "
        "reuses the result in its output_dir."
    )
    _add_launch(_Probe, subparsers, prog, "probe", text)


def _add_launch(command: type[_Run], subparsers: Any, prog: str, name: str, text: str) -> None:
    about = text + _FIELDS.format(prog=f"{prog} {name}")
    parser = command.create(
        _Subparsers(subparsers, prog, name, usage=f"{prog} {name} {_LAUNCH}", help=text, description=about, epilog="")
    )._parser
    how_much = parser.add_mutually_exclusive_group()
    how_much.add_argument(QUIET, dest="flags", action="append_const", const=QUIET, help="show only warnings")
    how_much.add_argument(
        VERBOSE, dest="flags", action="append_const", const=VERBOSE, help="log details, and the resolved config"
    )
    _say(parser, prog)


def _find_this_package_in_ranks() -> None:
    """Put this package on the path of processes that torchrun starts, unless it is installed.

    What stands in PYTHONPATH comes before the standard library: a folder of packages, or the working directory, would
    hide modules of it by files that have their names. The recipe adds the working directory, behind all else.
    """
    folder = Path(adaptive_batching.__file__).resolve().parents[1]
    installed = [Path(each).resolve() for each in (*site.getsitepackages(), site.getusersitepackages())]
    if folder not in installed:
        paths = [str(folder), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


class _Run(Run):
    """Looks at what is named before; torchtune would end in a traceback."""

    added: tuple[str, ...] = ()

    def _run_cmd(self, args: argparse.Namespace) -> None:
        is_ours = args.recipe.startswith("adaptive_batching/recipes/")
        name = Path(args.recipe).stem if is_ours else args.recipe
        if name in [recipe.name for recipe in recipes()] or not Path(args.recipe).is_file():
            args.recipe = find_recipe(name).name
        if "--config" not in args.recipe_args[:-1]:
            self._parser.error("--config <name or path> is missing after the recipe")
        config = args.recipe_args[args.recipe_args.index("--config") + 1]
        read_config(find_config(config), [])
        _find_this_package_in_ranks()
        if not re.fullmatch("auto|gpu|cpu|xpu|[1-9][0-9]*", str(args.nproc_per_node)):
            self._parser.error(
                f"--nproc_per_node {args.nproc_per_node} must be a number of processes, at least 1, or auto"
            )
        flags = args.flags or []
        # torchtune takes what stands before the recipe for torchrun's
        sys.argv = [self._parser.prog, *(argument for argument in sys.argv[1:] if argument not in flags)]
        args.recipe_args += [*flags, *self.added]
        sys.argv += [*flags, *self.added]
        if VERBOSE in flags:
            super()._run_cmd(args)
            return
        for told_by in _TELL_OF_PROCESSES_THAT_ENDED:
            logging.getLogger(told_by).setLevel(logging.CRITICAL)
        try:
            super()._run_cmd(args)
        except ChildFailedError as error:
            rank, first = error.get_first_failure()
            if first.exitcode < 0:
                end(
                    f"rank {rank} was ended by {first.signal_name()}; if that is SIGKILL, the host may have run out of "
                    "memory", 1
                )  # fmt: skip
            if isinstance(first.message, dict):  # the line that it has left
                end(first.message["message"].removeprefix("error: "), first.exitcode)
            raise SystemExit(first.exitcode) from None  # after its traceback


class _Probe(_Run):
    added = (ONLY_PROBES,)


def add_validate(subparsers: Any, prog: str) -> None:
    """Add ``validate``."""
    text = "Check a config and its overrides as a run does before it loads a model."
    parser = subparsers.add_parser("validate", prog=f"{prog} validate", help=text, description=text)
    parser.add_argument("config", help="name or path")
    parser.add_argument("--recipe", metavar="NAME", help="default: the one named in the config's comments")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="overrides of the config")

    from adaptive_batching._torchtune.stock.on_paper import make_on_paper  # takes seconds

    def validate(args: argparse.Namespace) -> None:
        sys.path.append(str(Path.cwd()))  # as a run does, for an increase function that lies there
        path = find_config(args.config)
        name = find_recipe(args.recipe).name if args.recipe else recipe_of(args.config, path)
        cfg = read_config(path, args.overrides)
        try:
            check_kinds(cfg)
            check_components(cfg)
            if name is not None:
                check_names(cfg, _known_keys(name) | {*FIELDS, *VALIDATION})
            check_settings(cfg, name)
            if name in PLANNED:
                with refused_in_one_line():
                    make_on_paper(name, cfg)
        except Exception as error:
            if (line := in_one_line(error, "while the config is checked")) is None:
                raise
            raise ConfigError(f"{path}: {line}") from None
        print("Config is well-formed!")

    parser.set_defaults(func=validate)


def _known_keys(recipe: str) -> set[str]:
    """Return the top-level keys of all configs that are listed with a recipe."""
    [names] = [[config.name for config in listed.configs] for listed in recipes() if listed.name == recipe]
    return {str(key) for name in names for key in OmegaConf.load(config_files()[name])}


# A run of a minute on two cores. The probe runs samples half as long as the longest, so that the first full batch
# runs out of memory, and is recovered.
_SHORT = [
    *("dataset.split=train[:384]", "lr_scheduler.num_warmup_steps=10"),
    *("adaptive_batching.memory_limit=1.5GiB", "adaptive_batching.sequence_length=128"),
]
_STAGED = """The out-of-memory error in this run is staged, to show how a step recovers: with sequence_length=128
the probe runs samples half as long as the longest, and memory_limit=1.5GiB is little. Copy neither to your own config.
"""
_NEXT = "lora_finetune_single_device --config llama3_2/1B_lora_single_device micro_batch_size=auto"
_REPOSITORY = "meta-llama/Llama-3.2-1B-Instruct"
_WEIGHTS = Path("/tmp/Llama-3.2-1B-Instruct")  # where that config looks for them


def add_quickstart(subparsers: Any, prog: str) -> None:
    """Add ``quickstart``."""
    text = "Make real data, a tokenizer and a small model, then probe, grow and train on the CPU. No download."
    parser = subparsers.add_parser("quickstart", prog=f"{prog} quickstart", help=text, description=text)
    parser.add_argument("--data_dir", type=Path, default=Path("data/quickstart"), help="default: %(default)s")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the config")

    def run(args: argparse.Namespace) -> None:
        folder, program = recipes_folder(), program_on_this_machine(prog)
        try:
            quickstart.build(args.data_dir)
        except FileExistsError as error:
            raise ConfigError(str(error)) from None
        except OSError as error:
            raise ConfigError(f"--data_dir {args.data_dir}: {error.strerror or error}; name another folder") from None
        overrides = [f"data_dir={args.data_dir}", *_SHORT, *args.overrides]
        command = f"{program} run full_finetune_single_device --config quickstart/full_single_device"
        print(f"Running this command:\n  {command} \\\n    {shlex.join(overrides)}\n\n{_STAGED}", flush=True)
        sys.argv = [parser.prog, "--config", f"{folder}/configs/quickstart/full_single_device.yaml", *overrides]
        try:
            runpy.run_path(str(folder / "full_finetune_single_device.py"), run_name="__main__")
        except SystemExit as ended:
            if ended.code:
                raise
        tune = program_on_this_machine("tune", "torchtune._cli.tune")
        print(f"\n{what_next(program, tune, has_gpu=torch.cuda.is_available())}")

    parser.set_defaults(func=run)


def program_on_this_machine(prog: str, module: str = "adaptive_batching") -> str:
    """Return what to type for a program on this machine: its name, its path, or the module."""
    if shutil.which(prog):
        return prog
    path = Path(sys.executable).with_name(prog)
    if os.access(path, os.X_OK):
        return shlex.quote(str(path))
    return f"{shlex.quote(sys.executable)} -m {module}"


def what_next(program: str, tune: str, *, has_gpu: bool) -> str:
    """Return the next commands to type, with what they need that is not there."""
    lines = [f"Next, with a config of your own, or one of torchtune's ('{tune} ls'):"]
    if not _WEIGHTS.is_dir():
        lines += [
            f"  {tune} download {_REPOSITORY} --output-dir {_WEIGHTS} \\",
            "    --ignore-patterns 'original/consolidated.00.pth' --hf-token TOKEN",
            f"    (first, as the weights are not in {_WEIGHTS}; the model's page on huggingface.co grants access)",
        ]
    on_cpu = "" if has_gpu else " device=cpu dtype=fp32"
    return "\n".join([*lines, f"  {program} run {_NEXT}{on_cpu}"])
