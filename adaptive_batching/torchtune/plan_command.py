"""``plan``: say what a config takes of a GPU, without one."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torchtune import _recipe_registry as registry
from torchtune.config._errors import InstantiationError
from torchtune.config._utils import _merge_yaml_and_cli_args

from adaptive_batching.growth.increase import IncreaseFunctionError
from adaptive_batching.plan import text
from adaptive_batching.plan.devices import Gpu, find_gpu
from adaptive_batching.plan.forecast import Need
from adaptive_batching.plan.verdict import Answer, Verdict
from adaptive_batching.probe.trace import TraceError
from adaptive_batching.torchtune.levers import CONFIGS, Lever, levers
from adaptive_batching.torchtune.on_paper import RECIPES
from adaptive_batching.torchtune.planning import Outlook, Question, Sketch, look_out, sketch
from adaptive_batching.values import ConfigError, MemoryAmount

VERSION = 1
"""Of the object that ``--json`` prints."""

LENGTHS = (512, 1024, 2048, 4096, 8192)
"""Tokens of a sample in the table for an unknown length."""

_USAGE_ERROR = 2


class CannotTellError(RuntimeError):
    """Raised for what a plan cannot be made of; the message says why."""


@dataclass(frozen=True)
class _Asked:
    """The command line, read."""

    config: str
    question: Question
    length: int | None
    memory_bytes: int | None
    gpu: Gpu | None
    mfu: float | None
    levers: bool


def add_plan(subparsers: Any, prog: str) -> None:
    """Add ``plan`` to a command line."""
    help_text = "Say whether a config fits on a GPU, what takes the memory, and what would help. Needs no GPU."
    parser = subparsers.add_parser(
        "plan", prog=f"{prog} plan", help=help_text, description=help_text,
        epilog="exit codes: 0 fits, 1 does not, 3 tight, 4 cannot tell, 2 a mistake on the command line",
    )  # fmt: skip
    parser.add_argument("--config", required=True, help="name, as 'ls' shows it, or path")
    parser.add_argument("--recipe", choices=RECIPES, help="recipe of a config that is no stock one")
    device = parser.add_mutually_exclusive_group()
    device.add_argument("--memory", metavar="24GiB", help="memory of the GPU")
    device.add_argument("--gpu", metavar="NAME", help="a GPU by name, such as 'RTX 4090' or H100")
    parser.add_argument("--sequence-length", type=int, metavar="N", help="tokens of the longest sample")
    parser.add_argument("--samples", type=int, metavar="N", help="samples of an epoch")
    parser.add_argument("--devices", type=int, metavar="N", help="number of GPUs")
    parser.add_argument("--mfu", type=float, metavar="0.4", help="share of the GPU's peak that training reaches")
    parser.add_argument("--no-levers", action="store_true", help="leave out what would help")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the config")
    parser.set_defaults(func=lambda args: sys.exit(_run(args)))


def _run(args: argparse.Namespace) -> int:
    """Print a plan, and return the exit code."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # processes that are forked below cannot take over threads
    try:
        asked = _read(args)
        return _plan(asked, as_json=args.json)
    except (ConfigError, IncreaseFunctionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return _USAGE_ERROR
    except (CannotTellError, TraceError) as error:
        print(
            json.dumps({"version": VERSION, "answer": "cannot tell", "reason": str(error)})
            if args.json
            else f"cannot tell: {error}"
        )
        return Answer.CANNOT_TELL.value
    except InstantiationError as error:
        missing = re.search(r"No module named '([^']+)'", str(error))
        if missing is None:
            print(f"error: {_first_line(error)}", file=sys.stderr)
            return _USAGE_ERROR
        print(f"cannot tell: the config needs {missing[1]!r}, which is not installed; pip install {missing[1]}")
        return Answer.CANNOT_TELL.value
    except (ValueError, RuntimeError, TypeError, KeyError, AttributeError, AssertionError) as error:
        print(f"error: torchtune refuses the config: {_first_line(error)}", file=sys.stderr)
        return _USAGE_ERROR


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _read(args: argparse.Namespace) -> _Asked:
    for name in ("sequence_length", "samples", "devices"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least 1")
    if args.mfu is not None and not 0 < args.mfu <= 1:
        raise ConfigError(f"--mfu {args.mfu} must be above 0 and at most 1")
    if args.mfu is not None and args.gpu is None:
        raise ConfigError(f"--mfu {args.mfu} is a share of a GPU's peak; name the GPU with --gpu")
    for override in args.overrides:
        if "=" not in override:
            raise ConfigError(f"{override!r} is no override; write key=value")
    gpu = None if args.gpu is None else find_gpu(args.gpu)
    recipe, path, cfg = _load(args.config, args.recipe, args.overrides)
    devices = args.devices or _devices_of(recipe, path)
    recipe = recipe.replace("single_device", "distributed") if devices > 1 else recipe
    length = args.sequence_length or _length_of(cfg)
    memory = None if args.memory is None else MemoryAmount.parse("--memory", args.memory)
    if memory is not None and memory.num_bytes is None:
        raise ConfigError(f"--memory {args.memory} is a share of an unknown device; write an amount such as 24GiB")
    memory_bytes = gpu.memory_bytes if gpu is not None else None if memory is None else memory.num_bytes
    question = Question(recipe, cfg, devices, args.samples)
    return _Asked(args.config, question, length, memory_bytes, gpu, args.mfu, not args.no_levers)


def _load(name: str, recipe: str | None, overrides: Sequence[str]) -> tuple[str, Path, DictConfig]:
    """Return the recipe, the file and the config that a name or path and overrides stand for.

    Raises:
        ConfigError: If there is no such config, or an override cannot be read.
        CannotTellError: If the config is of a recipe that is not covered.
    """
    found = [
        (stock.name, config) for stock in registry.get_all_recipes() for config in stock.configs if config.name == name
    ]
    path = Path(name)
    if found and not path.is_file():
        path = CONFIGS / found[0][1].file_path
        covered = [of for of, _ in found if of in RECIPES]
        if not covered and recipe is None:
            raise CannotTellError(f"{name} is a config of {found[0][0]}; plans are made of {', '.join(RECIPES)}")
        recipe = recipe or covered[0]
    elif not path.is_file():
        from adaptive_batching.torchtune.commands import closest

        known = [config.name for stock in registry.get_all_recipes() for config in stock.configs]
        raise ConfigError(f"--config {name}: there is no such file, and no such config{closest(name, known)}")
    try:
        values = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        cfg = _merge_yaml_and_cli_args(argparse.Namespace(**values), list(overrides))  # type: ignore[arg-type]
    except Exception as error:  # whatever YAML, omegaconf and torchtune raise
        raise ConfigError(f"{name} {' '.join(overrides)} cannot be read: {_first_line(error)}") from error
    if "model" not in cfg:
        raise ConfigError(f"--config {name} has no model; is it a config of a recipe?")
    recipe = recipe or ("lora" if "lora_attn_modules" in cfg.model else "full") + "_finetune_single_device"
    return recipe, path, cfg


def _devices_of(recipe: str, path: Path) -> int:
    """Return the number of devices that a config says it is launched with, or 1."""
    if recipe.endswith("single_device"):
        return 1
    said = re.search(r"--nproc_per_node (\d+)", path.read_text())
    return int(said[1]) if said else 2


def _length_of(cfg: DictConfig) -> int | None:
    section = cfg.get("adaptive_batching") or {}
    length = section.get("sequence_length") or cfg.tokenizer.get("max_seq_len")
    return None if length is None else int(length)


def _plan(asked: _Asked, *, as_json: bool) -> int:
    if asked.length is None:
        return _plan_over_lengths(asked, as_json=as_json)
    start = time.perf_counter()
    made = sketch(asked.question, asked.length)
    need = made.forecast.need(made.asked)
    verdict = made.forecast.judge(need, asked.memory_bytes)
    largest = None if asked.memory_bytes is None else made.forecast.largest(asked.memory_bytes)
    outlook = None
    if asked.question.samples is not None and largest:
        outlook = look_out(asked.question, asked.length, largest)
    found = _as_object(asked, made, need, verdict, largest, outlook)
    if not as_json:
        _show(asked, made, need, verdict, largest, outlook)
    if asked.levers:
        helps = _pull(asked, made, need)
        found["levers"] = helps
        if not as_json:
            print("\n".join(["", *_levers_table(helps, made)]), flush=True)
    found["seconds"] = round(time.perf_counter() - start, 2)
    if as_json:
        print(json.dumps(found, indent=1))
    return verdict.answer.value


def _show(
    asked: _Asked, made: Sketch, need: Need, verdict: Verdict, largest: int | None, outlook: Outlook | None
) -> None:
    what = f"a forward of {need.batch_size} x {made.length:,} tokens"
    where = f" on {asked.gpu.name}" if asked.gpu else ""
    where += f" on each of {made.devices} devices" if made.devices > 1 else ""
    lines = [text.first_line(verdict, what, where)]
    if largest is not None:
        lines += [
            f"largest micro-batch: {largest} samples of {made.length:,} tokens",
            f"token budget: {largest * made.length:,} padded tokens in a forward",
        ]
    lines += ["", *text.what_counts(need, made.forecast.outside, made.paged_bytes), "", *text.what_sets_the_peak(need)]
    lines += ["", *_epochs(asked, outlook), "", *_work(asked, made, need)]
    print("\n".join(lines), flush=True)


def _epochs(asked: _Asked, outlook: Outlook | None) -> list[str]:
    if asked.question.samples is None:
        return ["Epochs: number of samples unknown; give --samples"]
    if outlook is None:
        return ["Epochs: not planned, as no memory is given or nothing fits"]
    rows = [["epoch", "batch size", "global batch", "steps", "samples dropped"]]
    for epoch in outlook.epochs:
        sizes, windows = (" -> ".join(map(str, each)) for each in (epoch.batch_sizes, epoch.global_batch_sizes))
        rows.append([str(epoch.epoch), sizes, windows, str(epoch.steps), str(epoch.dropped_samples)])
    head = f"Epochs, with batches of at most {outlook.maximum} ({outlook.reason})"
    return [head + ("" if outlook.decided else "; training decides on growth, which is not shown"), *text.table(rows)]


def _work(asked: _Asked, made: Sketch, need: Need) -> list[str]:
    flops = need.flops - need.recomputed_flops
    line = f"Work: {flops / 1e12:.1f} TFLOPs a forward and backward"
    if need.recomputed_flops:
        line += f", and {need.recomputed_flops / 1e12:.1f} to compute activations again"
    lines = [line + f" ({need.batch_size} x {made.length:,} tokens, a device)"]
    hours = _hours(asked, need, made)
    if hours is not None and asked.gpu is not None:
        peak = f"{asked.mfu:.0%} of {asked.gpu.name}'s {asked.gpu.peak_tflops:g} TFLOPS"
        lines.append(f"  an epoch of {asked.question.samples:,} samples of that length: {hours:.2f} hours at {peak}")
    return lines


def _hours(asked: _Asked, need: Need, made: Sketch) -> float | None:
    """Return the hours of an epoch of samples of the longest length; model FLOPs, as MFU is defined on."""
    if asked.mfu is None or asked.gpu is None or asked.question.samples is None:
        return None
    per_sample = (need.flops - need.recomputed_flops) / need.batch_size
    seconds = per_sample * asked.question.samples / made.devices / (asked.gpu.peak_tflops * 1e12 * asked.mfu)
    return seconds / 3600


def _as_object(
    asked: _Asked, made: Sketch, need: Need, verdict: Verdict, largest: int | None, outlook: Outlook | None
) -> dict[str, Any]:
    return {
        "version": VERSION,
        "config": asked.config,
        "recipe": asked.question.recipe,
        "devices": made.devices,
        "answer": verdict.answer.name.lower().replace("_", " "),
        "fits": None if verdict.answer is Answer.CANNOT_TELL else verdict.answer is Answer.FITS,
        "memory_bytes": asked.memory_bytes,
        "needed_bytes": {"least": verdict.least_bytes, "most": verdict.most_bytes},
        "left_bytes": verdict.left_bytes,
        "sequence_length": made.length,
        "batch_size": need.batch_size,
        "peak_bytes": need.peak_bytes,
        "resting_bytes": need.resting_bytes,
        "reserved_bytes": need.reserved.by_default,
        "reserved": asdict(need.reserved),
        "outside_bytes": {each.name: [each.least, each.most] for each in made.forecast.outside},
        "paged_bytes": made.paged_bytes,
        "peak": {"moment": need.moment, **need.kinds},
        "largest_micro_batch": largest,
        "token_budget": None if largest is None else largest * made.length,
        "epochs": None if outlook is None else [asdict(epoch) for epoch in outlook.epochs],
        "flops": need.flops,
        "recomputed_flops": need.recomputed_flops,
        "hours_per_epoch": _hours(asked, need, made),
        "parameters": made.parameters,
        "trained_parameters": made.trained_parameters,
    }


# Levers, and other lengths: each a sketch of its own, made by as many processes as there are cores


def _pull(asked: _Asked, made: Sketch, need: Need) -> list[dict[str, Any]]:
    """Return what each lever saves and the largest batch with it, best first."""
    found = _in_parallel(
        _pulled, [(lever, made.asked, asked.memory_bytes) for lever in levers(asked.question, made.length)]
    )
    for each in found:
        if each["reserved_bytes"] is not None:
            each["saved_bytes"] = need.reserved.by_default - each["reserved_bytes"]
    return sorted(found, key=lambda each: -(each["saved_bytes"] if each["saved_bytes"] is not None else -(2**62)))


def _pulled(task: tuple[Lever, int, int | None]) -> dict[str, Any]:
    lever, batch_size, memory_bytes = task
    found: dict[str, Any] = {"name": lever.name, "paste": lever.paste, "saved_bytes": None, "reserved_bytes": None,
                             "largest_micro_batch": None, "sequence_length": lever.length, "reason": None}  # fmt: skip
    try:
        made = sketch(lever.question, lever.length)
        found["reserved_bytes"] = made.forecast.need(batch_size).reserved.by_default
        found["largest_micro_batch"] = None if memory_bytes is None else made.forecast.largest(memory_bytes)
    except Exception as error:  # whatever stock refuses or a trace cannot follow
        found["reason"] = _first_line(error)[:200]
    return found


def _levers_table(found: Sequence[dict[str, Any]], made: Sketch) -> list[str]:
    rows = [["", "saves", "then fits", "to paste"]]
    for each in found:
        saved = "?" if each["saved_bytes"] is None else text.size(each["saved_bytes"])
        largest = each["largest_micro_batch"]
        fits = "?" if largest is None else f"{largest} x {each['sequence_length']:,}"
        rows.append(
            [each["name"], saved, fits, each["paste"] if each["reason"] is None else f"not planned: {each['reason']}"]
        )
    return [f"What would help, of {made.asked} x {made.length:,} tokens", *text.table(rows)]


def _plan_over_lengths(asked: _Asked, *, as_json: bool) -> int:
    tasks = [(asked.question, length, asked.memory_bytes) for length in LENGTHS]
    found = _in_parallel(_at_length, tasks)
    if as_json:
        print(json.dumps({"version": VERSION, "config": asked.config, "answer": "cannot tell", "fits": None,
                          "reason": "length unknown", "lengths": found}, indent=1))  # fmt: skip
        return Answer.CANNOT_TELL.value
    print("cannot tell: length unknown, as tokenizer.max_seq_len is null; give --sequence-length")
    heads = [f"{found[0]['batch_size']} samples need", *(f"{b} need" for b in (1, 8, 32)), "largest micro-batch"]
    rows = {}
    for each in found:
        needs = [each["needed_bytes"], *(each["needed_by_batch"][b] for b in ("1", "8", "32"))]
        largest = "?" if each["largest_micro_batch"] is None else str(each["largest_micro_batch"])
        rows[each["sequence_length"]] = [*map(text.size, needs), largest]
    print("\n".join(text.lengths_table(rows, heads)))
    return Answer.CANNOT_TELL.value


def _at_length(task: tuple[Question, int, int | None]) -> dict[str, Any]:
    question, length, memory_bytes = task
    made = sketch(question, length)
    forecast = made.forecast

    def needed(batch_size: int) -> int:
        return forecast.judge(forecast.need(batch_size), None).most_bytes

    return {
        "sequence_length": length,
        "batch_size": made.asked,
        "needed_bytes": needed(made.asked),
        "needed_by_batch": {str(b): needed(b) for b in (1, 8, 32)},
        "largest_micro_batch": None if memory_bytes is None else forecast.largest(memory_bytes),
    }


def _in_parallel(function: Callable[[Any], Any], tasks: Sequence[Any]) -> list[Any]:
    workers = min(os.cpu_count() or 1, len(tasks), 4)  # each takes some hundred MiB
    if workers < 2:
        return [function(task) for task in tasks]
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        return list(pool.map(function, tasks))
