"""``plan``: say what a config takes of a GPU, without one."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import runpy
import sys
import warnings
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import huggingface_hub
from omegaconf import DictConfig, ListConfig, OmegaConf
from torchtune import _recipe_registry as registry
from torchtune import config
from torchtune.config._errors import InstantiationError
from torchtune.config._utils import _merge_yaml_and_cli_args
from torchtune.datasets import ConcatDataset
from tqdm import tqdm

from adaptive_batching._gpus import find_gpus
from adaptive_batching._growth.increase import IncreaseFunctionError
from adaptive_batching._plan import Answer, gpu_memory
from adaptive_batching._torchtune.names import LAUNCHED, closest, why_not_read
from adaptive_batching._torchtune.plan.meta_setup import RECIPES
from adaptive_batching._torchtune.plan.plan_answer import VERSION, Asked, answer
from adaptive_batching._torchtune.plan.planning import CONFIGS, NotPlannedError, PlanRequest
from adaptive_batching._torchtune.stock.losses import ANSWERS
from adaptive_batching._torchtune.train.stock_keys import check_kinds, not_loaded
from adaptive_batching._trace.traced_step import TraceError
from adaptive_batching._values import ConfigError, first_line


def add_plan(subparsers: Any, prog: str) -> None:
    help_text = "Say whether a config fits on a GPU, what takes the memory, and what would help. Needs no GPU."
    parser = subparsers.add_parser(
        "plan", prog=f"{prog} plan", help=help_text, description=help_text,
        usage="%(prog)s [recipe] config [key=value ...] [options]",
        epilog="exit codes: 0 fits, 1 does not, 3 tight, 4 cannot tell, 2 a mistake on the command line",
    )  # fmt: skip
    parser.add_argument("--config", metavar="CONFIG", help="the config, as in a line of 'run'")
    parser.add_argument("--recipe", choices=RECIPES, metavar="NAME", help="recipe for a config of your own")
    device = parser.add_mutually_exclusive_group()
    device.add_argument("--memory", metavar="24GiB", help="memory of the GPU; a plain number such as 24 is GiB")
    device.add_argument(
        "--gpu", metavar="NAME", action="append", default=[],
        help="a GPU by name, such as 4090 or 'h100 80gb'; several --gpu give a table of answers",
    )  # fmt: skip
    parser.add_argument("--sequence-length", type=int, metavar="N", help="tokens of the longest sample")
    parser.add_argument("--samples", type=int, metavar="N", help="samples of an epoch")
    parser.add_argument("--devices", "--nproc_per_node", type=int, metavar="N", help="number of GPUs")
    parser.add_argument("--table", action="store_true", help="show memory for other lengths and batch sizes")
    parser.add_argument("--no-levers", action="store_true", help="skip 'What would help'")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "overrides", nargs="*", metavar="[recipe] config [key=value ...]",
        help="a config, by name (see 'ls') or path, and its overrides; the recipe may stand before it",
    )  # fmt: skip
    parser.set_defaults(func=lambda args: sys.exit(_run(args)))


def _run(args: argparse.Namespace) -> int:
    warnings.simplefilter("ignore")
    try:
        return answer(_read(args), as_json=args.json)
    except (ConfigError, IncreaseFunctionError) as error:
        mistake = str(error)
    except (NotPlannedError, TraceError) as error:
        unknown = {"version": VERSION, "answer": str(Answer.CANNOT_TELL), "reason": str(error)}
        print(json.dumps(unknown) if args.json else f"{Answer.CANNOT_TELL}: {error}")
        return Answer.CANNOT_TELL.value
    except InstantiationError as error:
        mistake = not_loaded(error)
        missing = re.search(r"No module named '([^'.]+)", str(error))
        if missing is not None and find_spec(missing[1]) is None:
            print(f"cannot tell: the config needs the module {missing[1]!r}; install the package that has it")
            return Answer.CANNOT_TELL.value
    except (ValueError, RuntimeError, TypeError, KeyError, AttributeError, AssertionError) as error:
        mistake = f"torchtune refuses the config: {first_line(error)}"
    print(f"error: {mistake}", file=sys.stderr)
    return 2


def _read(args: argparse.Namespace) -> Asked:
    for name in ("sequence_length", "samples", "devices"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least 1")
    gpus = list(dict.fromkeys(gpu for name in args.gpu for gpu in find_gpus(name)))
    name, recipe, overrides = _named(args)
    recipe, path, cfg = load_config(name, recipe, overrides)
    said = re.search(r"--nproc_per_node (\d+)", path.read_text(errors="replace"))
    devices = args.devices or (1 if recipe.endswith("single_device") else int(said[1]) if said else 2)
    recipe = _on_so_many(recipe, devices)
    given = None if args.memory is None else gpu_memory(args.memory)
    memory_bytes = min((gpu.memory_bytes for gpu in gpus), default=given)
    section = cfg.get("adaptive_batching") or {}
    length = args.sequence_length or section.get("sequence_length") or cfg.tokenizer.get("max_seq_len")
    lengths, why = _read_lengths(cfg) if length is None or args.samples is None else (None, "")
    length = length or (max(lengths) if lengths else None)
    unknown = f"tokenizer.max_seq_len is null and the data could not be read ({why})"
    samples = args.samples or (len(lengths) if lengths else None)
    request = PlanRequest(recipe, cfg, devices, samples, memory_bytes, tells_time=bool(gpus))
    return Asked(
        name, request, None if length is None else int(length), unknown, lengths, gpus,
        not args.no_levers and len(gpus) < 2, args.table,
    )  # fmt: skip


def _named(args: argparse.Namespace) -> tuple[str, str | None, list[str]]:
    """Return the config, the recipe if there is one, and the overrides that a command line names."""

    def is_override(argument: str) -> bool:
        return "=" in argument or argument.startswith("~")

    names = [argument for argument in args.overrides if not is_override(argument)]
    recipes = registry.get_all_recipes()
    known = [recipe.name for recipe in recipes]
    configs = [config.name for recipe in recipes for config in recipe.configs]
    config, recipe = args.config, args.recipe
    first = Path(names[0]) if names else Path()
    is_recipe = first.stem in known and first.suffix in ("", ".py") and recipe in (None, first.stem)
    if is_recipe:
        recipe = first.stem
        names = names[1:]
    if config is None and names:
        config, *names = names
    if config is None:
        raise ConfigError(
            "name a config ('ls' lists them), for example: plan llama3_2/1B_lora_single_device --gpu 4090"
        )
    if is_recipe and recipe not in RECIPES:
        raise NotPlannedError(_not_covered(config, str(recipe)))
    for name in names:
        if not is_recipe and config not in configs and not Path(config).is_file():  # it stands where a recipe would
            raise ConfigError(f"there is no recipe {config!r}{closest(config, known)}")
        if args.config is not None and not is_recipe and get_close_matches(name, known, n=1):
            raise ConfigError(f"there is no recipe {name!r}{closest(name, known)}")
        raise ConfigError(f"{name!r} is not an override; write key=value")
    return config, recipe, [argument for argument in args.overrides if is_override(argument)]


def load_config(name: str, recipe: str | None, overrides: Sequence[str]) -> tuple[str, Path, DictConfig]:
    """Return the recipe, the file and the config that a name or path and overrides stand for."""
    shipped = [(stock.name, config) for stock in registry.get_all_recipes() for config in stock.configs]
    files = [(recipe_name, config.file_path) for recipe_name, config in shipped if config.name == name]
    path = Path(name)
    if files and not path.is_file():
        path = CONFIGS / files[0][1]
        recipe = recipe or next((of for of, _ in files if of in RECIPES), None)
        if recipe is None:
            raise NotPlannedError(_not_covered(name, files[0][0]))
    elif not path.is_file():
        for other in runpy.run_path(registry.__file__)["_ALL_RECIPES"]:  # as torchtune ships them
            if name in [config_file.name for config_file in other.configs]:
                raise NotPlannedError(_not_covered(name, other.name))
        raise ConfigError(f"there is no config {name!r}{closest(name, [config.name for _, config in shipped])}")
    try:
        values = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except Exception as error:  # whatever is wrong with it
        raise ConfigError(f"{name} cannot be read: {why_not_read(error)}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{name} is not a config: it must map keys to values")
    try:
        cfg = _merge_yaml_and_cli_args(argparse.Namespace(**values), list(overrides))  # type: ignore[arg-type]
    except Exception as error:  # whatever torchtune and omegaconf raise
        raise ConfigError(f"{' '.join(overrides)} cannot be read ({first_line(error)}); write key=value") from error
    check_kinds(cfg)
    if "model" not in cfg and "policy_model" not in cfg:
        raise ConfigError(f"{name} has no model; is it a config of a recipe?")
    return recipe or _recipe_of(path, cfg), path, cfg


def _recipe_of(path: Path, cfg: DictConfig) -> str:
    """Return the recipe that a config names in its launch command, or else the one that its keys are for."""
    launched: list[str] = re.findall(LAUNCHED, path.read_text())
    if covered := [name for name in launched if name in RECIPES]:
        return covered[0]
    names = [recipe.name for recipe in registry.get_all_recipes()]
    other = next((name for name in launched if name in names), "eleuther_eval" if "tasks" in cfg else None)
    if other is not None:
        raise NotPlannedError(_not_covered(str(path), other))
    adapters = "lora_attn_modules" in cfg.model
    if "quantizer" in cfg:
        return "qat_lora_finetune_distributed" if adapters else "qat_distributed"
    if "teacher_model" in cfg:
        return "knowledge_distillation_single_device"
    if "DPO" in str(cfg.loss["_component_"]):
        return "lora_dpo_single_device" if adapters else "full_dpo_distributed"
    return ("lora" if adapters else "full") + "_finetune_single_device"


def _on_so_many(recipe: str, devices: int) -> str:
    several = recipe.replace("single_device", "distributed")
    if devices > 1:
        return several
    alone = several.replace("distributed", "single_device")
    if alone not in RECIPES:
        raise ConfigError(f"--devices 1: torchtune has no {alone}, and {several} is for 2 or more")
    return alone


def _not_covered(config: str, recipe: str) -> str:
    return f"{config} is a config of {recipe}; plan supports {', '.join(RECIPES)}"


def _read_lengths(cfg: DictConfig) -> tuple[list[int] | None, str]:
    """Return the tokens of each sample, of a pair those of its longer answer; or None, and why they cannot be read."""
    keys = ("tokens", *(f"{kind}_input_ids" for kind in ANSWERS))
    try:
        with _offline():
            tokenizer = config.instantiate(cfg.tokenizer)
            if isinstance(cfg.dataset, ListConfig):
                dataset = ConcatDataset(datasets=[config.instantiate(source, tokenizer) for source in cfg.dataset])
            else:
                dataset = config.instantiate(cfg.dataset, tokenizer)
            indices = tqdm(range(len(dataset)), desc="Measuring samples", dynamic_ncols=True, leave=False)
            samples = (dataset[index] for index in indices)
            lengths = [max(len(sample[key]) for key in keys if key in sample) for sample in samples]
    except Exception as error:  # each format of tokenizers and data raises its own
        line = (str(error).strip().splitlines() or [""])[0]
        return None, f"{type(error).__name__}: {line[:160]}"
    return (lengths, "") if lengths else (None, "the data set has no samples")


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Have data sets of a hub come from the cache alone: where there is no network, each would be waited for."""
    with contextlib.ExitStack() as stack:
        for module in (datasets.config, huggingface_hub.constants):
            for name in {"HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"} & set(vars(module)):
                stack.enter_context(mock.patch.object(module, name, True))
        if datasets.utils.logging.is_progress_bar_enabled():
            datasets.disable_progress_bars()
            stack.callback(datasets.enable_progress_bars)
        yield
