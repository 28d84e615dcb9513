"""``plan``: a dry run of a recipe with its own probe, which says the largest batch that fits a GPU.

Neither torch nor torchtune is imported here: the recipe runs in a process of its own, and so does each plan of another
GPU, or with another setting.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from adaptive_batching._dry_run.answer import DryRun, peak_in_words
from adaptive_batching._dry_run.cards import Gpu, find_gpus, gpu_memory
from adaptive_batching._dry_run.device import BuildError, build
from adaptive_batching._dry_run.on_cards import Launch, interruptible
from adaptive_batching._dry_run.time.forecast import RunLength
from adaptive_batching._dry_run.time.seconds import UNCORRECTED
from adaptive_batching._dry_run.times import time_as_object, time_in_words
from adaptive_batching._dry_run.verdict import Answer, outside_of_allocator
from adaptive_batching._report.events import RecordError, read_events
from adaptive_batching._torchtune.cli.levers import Lever, Planned, levers
from adaptive_batching._torchtune.names import (
    LAUNCHED,
    PLANNED,
    TOLD,
    closest,
    command_of_recipe,
    config_files,
    recipe_of,
    recipes,
)
from adaptive_batching._values import ConfigError, first_line, memory_size

VERSION = 2
"""Of the object that ``--json`` prints. Version 1 was a model of the run, and no run."""

MOST_SAMPLES = 8192
"""Of a batch, where neither ``max_batch_size`` nor the data bound it."""

MISTAKE = 2  # exit code
STEPS = 2  # of training: the second one has the optimizer states
AT_ONCE = 2  # processes
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}  # data of a hub come from its cache
_SAID = re.compile(r"(?m)^(?:\[rank\d+\]:? ?)?error: (.*)$")


class NotPlannedError(RuntimeError):
    """Raised for what no plan can be made of; the message says why."""


def add_plan(subparsers: Any, prog: str) -> None:
    """Add ``plan``."""
    text = (
        "Run a recipe with its probe on an emulated GPU, and say the largest batch that fits, what takes the memory, "
        "and how long it takes. Needs Linux on x86-64, a CUDA build of torch and a C++ compiler, and no GPU."
    )
    parser = subparsers.add_parser(
        "plan", prog=f"{prog} plan", help=text.split(". ")[0] + ".", description=text,
        usage="%(prog)s [recipe] config [key=value ...] (--gpu NAME | --memory 24GiB) [options]",
        epilog="exit codes: 0 fits, 1 does not, 3 tight, 4 cannot tell, 2 a mistake on the command line",
    )  # fmt: skip
    parser.add_argument("--config", metavar="CONFIG", help="the config, as in a line of 'run'")
    parser.add_argument("--recipe", choices=PLANNED, metavar="NAME", help="recipe for a config of your own")
    device = parser.add_mutually_exclusive_group()
    device.add_argument("--memory", metavar="24GiB", help="memory of the GPU; a plain number such as 24 is GiB")
    device.add_argument(
        "--gpu", metavar="NAME", action="append", default=[],
        help="a GPU by name, such as 4090 or 'h100 80gb'; several --gpu give a table of answers",
    )  # fmt: skip
    parser.add_argument("--sequence-length", type=int, metavar="N", help="tokens of the longest sample")
    parser.add_argument("--samples", type=int, metavar="N", help="samples of an epoch")
    parser.add_argument("--gpus", "--devices", "--nproc_per_node", type=int, metavar="N", help="number of GPUs")
    parser.add_argument("--levers", action="store_true", help="try each setting that saves memory and is not used yet")
    parser.add_argument("--tokens", type=float, metavar="N", help="tokens of the whole run, such as 1e9, for its hours")
    parser.add_argument("--price", type=float, metavar="1.99", help="of an hour of one GPU, for the cost")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "overrides", nargs="*", metavar="[recipe] config [key=value ...]",
        help="a config, by name (see 'tune ls') or path, and its overrides; the recipe may stand before it",
    )  # fmt: skip
    parser.set_defaults(func=lambda args: sys.exit(_run(args)))


@dataclass(frozen=True)
class Asked:
    """The command line, read."""

    run: Planned
    launch: Launch
    length: int | None  # None for that of the config, or of its data
    samples: int | None
    tokens: float | None
    price: float | None

    @property
    def batch_size(self) -> int:
        """The samples of a forward pass that the config asks for; 1 if it takes what fits."""
        cfg = self.run.cfg
        if isinstance(size := cfg.get("micro_batch_size"), int):
            return size
        takes_what_fits = size is not None or cfg.get("use_maximum_batch_size", False)
        return 1 if takes_what_fits else int(cfg.get("batch_size", 1))

    @property
    def accumulation(self) -> int:
        return int(self.run.cfg.get("gradient_accumulation_steps") or 1)


def _run(args: argparse.Namespace) -> int:
    started = time.perf_counter()
    try:
        gpus = list(dict.fromkeys(gpu for name in args.gpu for gpu in find_gpus(name)))
        run, length = _named(args), args.sequence_length
        if not gpus and args.memory is None:
            raise ConfigError("give the card by --gpu, or its memory by --memory")
        memory = gpu_memory(args.memory) if args.memory is not None else 0
        build()  # before many processes find out that it cannot be
        if len(gpus) > 1:
            return _compared(args, gpus)
        with tempfile.TemporaryDirectory(prefix="plan-") as folder, (Path(folder) / "said").open("wb") as said:
            launch = Launch(
                gpus[0] if gpus else None, memory, steps=STEPS, max_seconds=1200, output=said.fileno(),
                errors=said.fileno(), says=False,
            )  # fmt: skip
            asked = Asked(run, launch, length, args.samples, args.tokens, args.price)
            shown, lines, code = _plan(asked, Path(folder))
        if not args.json:
            print("\n".join(lines), flush=True)
        if args.levers and shown["sequence_length"] is not None:
            shown["levers"] = _pull(args, run, shown["sequence_length"])
    except KeyboardInterrupt:
        print("plan: interrupted", file=sys.stderr)
        return Answer.CANNOT_TELL.value
    except NotPlannedError as error:
        unknown = {"version": VERSION, "answer": str(Answer.CANNOT_TELL), "fits": None, "reason": str(error)}
        print(json.dumps(unknown) if args.json else f"{Answer.CANNOT_TELL}: {error}")
        return Answer.CANNOT_TELL.value
    except (BuildError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return MISTAKE
    shown["seconds"] = round(time.perf_counter() - started, 1)
    if args.json:
        print(json.dumps(shown, indent=1))
    return code


# The command line


def _named(args: argparse.Namespace) -> Planned:
    """Return the run that a command line names.

    Raises:
        ConfigError: If it names none, or in a way that cannot be.
        NotPlannedError: If it is of a recipe that is not covered.
    """
    for name in ("sequence_length", "samples", "gpus"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least 1")
    for name in ("tokens", "price"):
        if (value := getattr(args, name)) is not None and not value > 0:
            raise ConfigError(f"--{name} {value:g} must be more than 0")
    given = [argument for argument in args.overrides if "=" not in argument and not argument.startswith("~")]
    overrides = tuple(argument for argument in args.overrides if argument not in given)
    known, configs = [recipe.name for recipe in recipes()], config_files()
    recipe, config = args.recipe, args.config
    first = Path(given[0]) if given else Path()
    is_recipe = first.stem in known and first.suffix in ("", ".py") and recipe in (None, first.stem)
    if is_recipe:
        recipe, given = first.stem, given[1:]
    if config is None and given:
        config, *given = given
    if config is None:
        raise ConfigError(
            "name a config ('tune ls' lists torchtune's), for example: plan llama3_2/1B_lora_single_device --gpu 4090"
        )
    for name in given:
        if not is_recipe and config not in configs and not Path(config).is_file():  # it stands where a recipe would
            raise ConfigError(f"there is no recipe {config!r}{closest(config, known)}")
        if args.config is not None and not is_recipe and get_close_matches(name, known, n=1):
            raise ConfigError(f"there is no recipe {name!r}{closest(name, known)}")
        raise ConfigError(f"{name!r} is not an override; write key=value")
    path = Path(config) if Path(config).is_file() else configs.get(config)
    if path is None:
        raise ConfigError(f"there is no config {config!r}{closest(config, configs)}")
    cfg = _read_config(path, overrides)
    recipe = recipe or _recipe_of(config, path, cfg)
    if recipe not in PLANNED:
        raise NotPlannedError(f"{config} is a config of {recipe}; plan supports {', '.join(PLANNED)}")
    said = re.search(r"--nproc_per_node (\d+)", path.read_text(errors="replace"))
    devices = args.gpus or (1 if recipe.endswith("single_device") else int(said[1]) if said else 2)
    return Planned(_on_so_many(recipe, devices), config, cfg, overrides, args.sequence_length or 0, devices)


def _read_config(path: Path, overrides: Sequence[str]) -> DictConfig:
    """Return a config as far as this process asks it; that of the recipe reads it as torchtune does, and may refuse."""
    try:
        cfg = OmegaConf.load(path)
        if not isinstance(cfg, DictConfig):
            raise ConfigError(f"{path} is not a config: it must map keys to values")
        for override in overrides:
            key, _, value = override.partition("=")
            if override.startswith("~"):
                at, _, last = key[1:].rpartition(".")
                (OmegaConf.select(cfg, at) if at else cfg).pop(last)
                continue
            of_component = OmegaConf.is_dict(OmegaConf.select(cfg, key)) and "_component_" in OmegaConf.select(cfg, key)
            merged = OmegaConf.merge(cfg, OmegaConf.from_dotlist([f"{key}{'._component_' * of_component}={value}"]))
            assert isinstance(merged, DictConfig)
            cfg = merged
    except ConfigError:
        raise
    except Exception as error:  # whatever is wrong with it
        said = " ".join([str(path), *overrides])
        raise ConfigError(f"{said} cannot be read ({first_line(error)}); write key=value") from error
    return cfg


def _recipe_of(config: str, path: Path, cfg: DictConfig) -> str:
    """Return the recipe that lists a config, or that it names in its launch command, or else that its keys are for."""
    listing = [recipe.name for recipe in recipes() if config in [each.name for each in recipe.configs]]
    names = [recipe.name for recipe in recipes()]
    launched = [name for name in re.findall(LAUNCHED, path.read_text(errors="replace")) if name in names]
    for name in (*listing, *launched):
        if name in PLANNED:
            return str(name)
    if (other := recipe_of(config, path)) is not None:
        return other
    if "model" not in cfg:
        raise ConfigError(f"{config} has no model; is it a config of a recipe?")
    adapters = "lora_attn_modules" in cfg.model
    if "quantizer" in cfg:
        return "qat_lora_finetune_distributed" if adapters else "qat_distributed"
    if "teacher_model" in cfg:
        return "knowledge_distillation_single_device"
    if "DPO" in str(OmegaConf.select(cfg, "loss._component_")):
        return "lora_dpo_single_device" if adapters else "full_dpo_distributed"
    return ("lora" if adapters else "full") + "_finetune_single_device"


def _on_so_many(recipe: str, devices: int) -> str:
    several = recipe.replace("single_device", "distributed")
    if devices > 1:
        return several
    alone = several.replace("distributed", "single_device")
    if alone not in PLANNED:
        raise ConfigError(f"--gpus 1: torchtune has no {alone}, and {several} is for 2 or more")
    return alone


# A plan


def _plan(asked: Asked, folder: Path) -> tuple[dict[str, Any], list[str], int]:
    """Run a recipe with its probe; return what ``--json`` prints, lines, and the exit code."""
    run, accumulation = asked.run, asked.accumulation
    samples = MOST_SAMPLES if asked.samples is None else asked.samples // run.devices // accumulation
    command = command_of_recipe(
        [run.recipe, "--config", run.config, *run.overrides], folder, run.devices, asked.length,
        samples=max(min(samples, MOST_SAMPLES), 1) * _forwards(asked) * run.devices, accumulation=accumulation,
    )  # fmt: skip
    done = asked.launch.run(command, folder, OFFLINE)
    said = _SAID.findall((folder / "said").read_text(errors="replace"))
    told: dict[str, Any] = json.loads(path.read_text()) if (path := folder / TOLD).exists() else {}
    probe = _probe_in(folder)
    if done.ending.exit_code == MISTAKE:
        raise ConfigError(said[-1] if said else "the recipe ended with a mistake")
    length = told.get("length")
    if probe is None and done.failure is None and not (said and said[-1].startswith("a batch of one sample does not")):
        if length is None and not done.ending.interrupted:
            raise NotPlannedError(said[-1] if said else f"{done.why_not}")
        return _unknown(asked, done, length, said)
    return _answered(asked, done, told, probe, said)


def _probe_in(folder: Path) -> Mapping[str, Any] | None:
    with contextlib.suppress(RecordError, OSError, UnicodeDecodeError):
        return next(reversed(read_events(folder / "out" / "adaptive_batching" / "report.jsonl")["probe"]), None)
    return None


def _unknown(
    asked: Asked, done: DryRun, length: int | None, said: Sequence[str]
) -> tuple[dict[str, Any], list[str], int]:
    reason = done.why_not or "the recipe ended before its probe"
    if said:
        reason = said[-1]
    answer = Answer.CANNOT_TELL
    shown = {**_object(asked, length), "answer": str(answer), "fits": None, "reason": reason}
    return shown, [f"{answer}: {reason}"], answer.value


def _object(asked: Asked, length: int | None) -> dict[str, Any]:
    run, gpu = asked.run, asked.launch.gpu
    memory = asked.launch.memory_bytes if gpu is None else gpu.memory_bytes
    return {
        "version": VERSION, "config": run.config, "recipe": run.recipe, "devices": run.devices,
        "card": None if gpu is None else gpu.name, "memory_bytes": memory, "batch_size": asked.batch_size,
        "sequence_length": length, "gpus": [], "levers": [],
    }  # fmt: skip


def _answered(
    asked: Asked, done: DryRun, told: Mapping[str, Any], probe: Mapping[str, Any] | None, said: Sequence[str]
) -> tuple[dict[str, Any], list[str], int]:
    length, devices = int(told["length"]), asked.run.devices
    trained = probe is not None and done.steps > 0 and done.failure is None
    largest = 0 if probe is None else int(probe["batch_size"])
    card = done.card
    most = sum(each.most for each in outside_of_allocator(devices)) - card.context_bytes
    answer = Answer.DOES_NOT_FIT
    if largest >= asked.batch_size:
        is_close = largest == asked.batch_size and trained and most > done.left_bytes
        answer = Answer.TIGHT if is_close else Answer.FITS
    reason = None
    if probe is None:
        reason = re.split("; | \\(", said[-1])[0] if said else "out of memory before the probe"
    elif not trained:
        reason = done.why_not or "the largest batch ran out of memory in training"
        answer = Answer.CANNOT_TELL
    ran = [] if probe is None else probe["measurements"]
    peaks = (done.worst or {"peaks": {}})["peaks"]
    history = (done.worst or {}).get("history", {})
    time, of_time = _time(asked, done, told)
    shown = {
        **_object(asked, length),
        "answer": str(answer),
        "fits": None if answer is Answer.CANNOT_TELL else answer is not Answer.DOES_NOT_FIT,
        "reason": reason,
        "largest_micro_batch": largest,
        "token_budget": largest * length,
        "bound": None if probe is None else probe["reason"],
        "probe": [{key: one.get(key) for key in ("batch_size", "fits", "peak_bytes", "steps")} for one in ran],
        "peak_bytes": peaks.get("allocated"),
        "reserved_bytes": peaks.get("reserved"),
        "left_bytes": done.left_bytes if trained else None,
        "peak": {key: value for key, value in history.items() if key not in ("points", "steps_end")},
        "failed_allocation": done.failure,
        "time": time,
        "hours_per_epoch": None if time is None else time["hours_per_epoch"],
    }  # fmt: skip
    on = f"{card}{f', on each of {devices}' if devices > 1 else ''}"
    wanted = f"a forward of {asked.batch_size} x {length:,} tokens on {on}"
    lines = [f"{answer}: {wanted}" + ("" if reason is None else f": {reason}")]
    if largest:
        assert probe is not None
        lines.append(f"largest micro-batch: {_samples(largest)} of {length:,} tokens, bound by {probe['reason']}")
        lines.append(f"token budget: {largest * length:,} padded tokens in a forward")
        sizes = ", ".join(f"{one['batch_size']:,}{'' if one['fits'] else ' (too large)'}" for one in ran)
        lines.append(f"  {'tried':<10}{sizes}, by the probe of the recipe on the emulated device")
    if done.worst is not None:
        lines += peak_in_words(done)
    lines += [f"  {name:<10}{text}" for name, text in of_time]
    if answer is Answer.TIGHT:
        what = "CUDA's context and NCCL" if devices > 1 else "CUDA's context"
        amount = memory_size(card.context_bytes + most)
        lines.append(f"  {'tight':<10}{what} may take up to {amount} on a real card")
    if answer is Answer.DOES_NOT_FIT:
        lines.append(f"  {'to do':<10}--levers tries what takes less")
    return shown, lines, answer.value


def _time(asked: Asked, done: DryRun, told: Mapping[str, Any]) -> tuple[dict[str, Any] | None, list[tuple[str, str]]]:
    """Return how long a step of the largest batch takes, of at most two forward passes, as an object and in words."""
    forecast = done.forecast
    if forecast is None:
        return None, [("time", f"not known: {done.why_no_time}")] if done.lacks_time else []
    tokens = told.get("tokens")
    if tokens is None and asked.samples is not None:
        tokens = asked.samples * int(told["length"])
    length = RunLength(tokens=asked.tokens or tokens, price=asked.price)
    shown = time_as_object(forecast, length, UNCORRECTED)
    shown["hours_per_epoch"] = None if tokens is None else forecast.hours(RunLength(tokens=tokens))
    shown["seconds_per_forward"] = forecast.step.seconds / _forwards(asked)
    return shown, time_in_words(forecast, length)


def _forwards(asked: Asked) -> int:
    """Return the forward passes of a step of the plan, as ``dry_run.accumulate_for_plan`` has them."""
    cfg = asked.run.cfg
    splits = cfg.get("micro_batch_size") is not None
    return 2 if (asked.accumulation > 1 or splits) and not cfg.get("optimizer_in_bwd") else 1


def _samples(number: int) -> str:
    return "1 sample" if number == 1 else f"{number:,} samples"


# Several plans


def _others(commands: Iterable[Sequence[str]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the object of each plan as it is made, in a process of its own."""

    def plan(arguments: Sequence[str]) -> dict[str, Any]:
        command = [sys.executable, "-m", "adaptive_batching", "plan", "--json", *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        running.append(process)
        printed, said = process.communicate()
        try:
            found: dict[str, Any] = json.loads(printed)
            return found
        except ValueError:
            errors = _SAID.findall(said)
            return {"answer": str(Answer.CANNOT_TELL), "reason": errors[-1] if errors else "it ended without an answer"}

    running: list[subprocess.Popen[str]] = []
    listed = [*commands]
    with interruptible(), ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            waiting = {pool.submit(plan, arguments): number for number, arguments in enumerate(listed)}
            while waiting:
                for future in [future for future in waiting if future.done()]:
                    yield waiting.pop(future), future.result()
                time.sleep(0.1)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in running:
                process.terminate()
            raise


def _compared(args: argparse.Namespace, gpus: Sequence[Gpu]) -> int:
    """Print the answer on several GPUs, one line each; return the exit code of the smallest."""
    config = [] if args.config is None else ["--config", args.config]
    rest = [*args.overrides, *config, *_options(args, args.sequence_length, args.gpus)]
    found = dict(_others([*rest, "--gpu", gpu.name] for gpu in gpus))
    plans = [found[number] for number in range(len(gpus))]
    smallest = plans[min(range(len(gpus)), key=lambda number: gpus[number].memory_bytes)]
    codes = {str(answer): answer.value for answer in Answer}
    if args.json:
        keys = ("answer", "reason", "memory_bytes", "largest_micro_batch", "token_budget", "time")
        of_gpus = [
            {"name": gpu.name, **{key: plan.get(key) for key in keys}} for gpu, plan in zip(gpus, plans, strict=True)
        ]
        print(json.dumps({**smallest, "gpus": of_gpus}, indent=1))
        return codes[smallest["answer"]]
    rows = [["GPU", "memory", "answer", "largest micro-batch", "tokens/s", "hours", "cost"]]
    for gpu, plan in zip(gpus, plans, strict=True):
        took = plan.get("time") or {}
        rate, hours, cost = (took.get(key) for key in ("tokens_per_second", "hours", "cost"))
        largest = plan.get("largest_micro_batch")
        rows.append([
            gpu.name, memory_size(gpu.memory_bytes), plan["answer"], "-" if largest is None else f"{largest:,}",
            "-" if rate is None else f"{rate:,.0f}", "-" if hours is None else f"{hours:,.3g}",
            "-" if cost is None else f"{cost:,.2f}",
        ])  # fmt: skip
    print("\n".join(_table(rows)))
    for gpu, plan in zip(gpus, plans, strict=True):
        if plan.get("reason"):
            print(f"  {gpu.name}: {plan['reason']}")
    return codes[smallest["answer"]]


def _pull(args: argparse.Namespace, run: Planned, length: int) -> list[dict[str, Any]]:
    """Plan each lever, and print it as its answer comes; return them, those with the most tokens first."""
    pulled = [*levers(Planned(run.recipe, run.config, run.cfg, run.overrides, length, run.devices))]
    device = ["--memory", args.memory] if args.memory is not None else ["--gpu", args.gpu[0]]
    rows: list[dict[str, Any]] = []
    if not args.json:
        print("\nWhat would help (each by itself)\n" + _lever_line("", "largest", "tokens/s", "to paste"), flush=True)
    for number, plan in _others([*_arguments(args, lever), *device] for lever in pulled):
        lever, took = pulled[number], plan.get("time") or {}
        row = {
            "name": lever.name, "paste": lever.paste, "sequence_length": lever.length,
            "largest_micro_batch": plan.get("largest_micro_batch"), "token_budget": plan.get("token_budget"),
            "tokens_per_second": took.get("tokens_per_second"), "reason": plan.get("reason"),
        }  # fmt: skip
        rows.append(row)
        if not args.json:
            largest, rate = row["largest_micro_batch"], row["tokens_per_second"]
            fits = "?" if largest is None else f"{largest:,} x {lever.length:,}"
            paste = lever.paste if row["reason"] is None else f"{lever.paste}: {row['reason']}"
            print(_lever_line(lever.name, fits, "-" if rate is None else f"{rate:,.0f}", paste), flush=True)
    return sorted(rows, key=lambda row: -(row["token_budget"] or 0))


def _arguments(args: argparse.Namespace, lever: Lever) -> list[str]:
    command = [lever.recipe, "--config", lever.config, *lever.overrides]
    return [*command, *_options(args, lever.length, lever.devices, recipe=False)]


def _options(args: argparse.Namespace, length: int | None, devices: int | None, *, recipe: bool = True) -> list[str]:
    """Return the options that plans which are made for another one have in common with it."""
    given = {
        "--recipe": args.recipe if recipe else None, "--sequence-length": length, "--gpus": devices,
        "--samples": args.samples, "--tokens": args.tokens, "--price": args.price,
    }  # fmt: skip
    return [part for name, value in given.items() if value is not None for part in (name, str(value))]


def _lever_line(name: str, fits: str, rate: str, paste: str) -> str:
    return f"  {name:<38}  {fits:<14}  {rate:<8}  {paste}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines with columns that line up; the last column is as wide as it is."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
