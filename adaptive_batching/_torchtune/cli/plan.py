"""``plan``: a dry run of a recipe with its own probe, which says the largest batch that fits a GPU.

Neither torch nor torchtune is imported here: the recipe runs in a process of its own, and so does each plan of another
GPU, or with another setting.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from adaptive_batching._dry_run.cards import find_gpus, gpu_memory
from adaptive_batching._dry_run.device import build
from adaptive_batching._dry_run.on_cards import Launch
from adaptive_batching._dry_run.verdict import Answer
from adaptive_batching._torchtune.cli.levers import Planned
from adaptive_batching._torchtune.cli.one_plan import VERSION, Asked, NotPlannedError, make_plan
from adaptive_batching._torchtune.cli.several_plans import compare_gpus, pull_levers
from adaptive_batching._torchtune.names import LAUNCHED, PLANNED, closest, config_files, recipe_of, recipes
from adaptive_batching._values import ConfigError, first_line

STEPS = 2  # of training: the second one has the optimizer states


def add_plan(subparsers: Any, prog: str) -> None:
    """Add ``plan``."""
    text = (
        "Run a recipe with its probe on an emulated GPU, and report the largest batch that fits, what takes the "
        "memory, and how long it takes. Needs Linux on x86-64, a CUDA build of torch and a C++ compiler, and no GPU."
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


def _run(args: argparse.Namespace) -> int:
    started = time.perf_counter()
    try:
        gpus = list(dict.fromkeys(gpu for name in args.gpu for gpu in find_gpus(name)))
        run, length = _named(args), args.sequence_length
        if not gpus and args.memory is None:
            raise ConfigError("give the card by --gpu, or its memory by --memory")
        memory = gpu_memory(args.memory) if args.memory is not None else 0
        if args.levers and len(gpus) > 1:
            raise ConfigError(f"--levers is for one card, and --gpu names {len(gpus)}; name one, with its size")
        build()  # before many processes find out that it cannot be
        if len(gpus) > 1:
            return compare_gpus(args, gpus)
        with tempfile.TemporaryDirectory(prefix="plan-") as folder, (Path(folder) / "said").open("wb") as said:
            launch = Launch(
                gpus[0] if gpus else None, memory, steps=STEPS, max_seconds=1200, output=said.fileno(),
                errors=said.fileno(), says=False,
            )  # fmt: skip
            asked = Asked(run, launch, length, args.samples, args.tokens, args.price)
            shown, lines, code = make_plan(asked, Path(folder))
        if not args.json:
            print("\n".join(lines), flush=True)
        if args.levers and shown["sequence_length"] is not None:
            shown["levers"] = pull_levers(args, run, shown["sequence_length"])
    except KeyboardInterrupt:
        print("plan: interrupted", file=sys.stderr)
        return Answer.CANNOT_TELL.value
    except NotPlannedError as error:
        unknown = {"version": VERSION, "answer": str(Answer.CANNOT_TELL), "fits": None, "reason": str(error)}
        print(json.dumps(unknown) if args.json else f"{Answer.CANNOT_TELL}: {error}")
        return Answer.CANNOT_TELL.value
    shown["seconds"] = round(time.perf_counter() - started, 1)
    if args.json:
        print(json.dumps(shown, indent=1))
    return code


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
