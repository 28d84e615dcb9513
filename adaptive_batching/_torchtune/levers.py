"""Plans of many runs, made in parallel: with each change that would help, and over lengths and batch sizes.

Their processes are forked from one that has only imported what they need, not from the one that asks: where autograd
has run with a CUDA build of torch, which the plan itself has it do, it refuses to run in a fork.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torchtune
from omegaconf import DictConfig, OmegaConf
from torchtune import _recipe_registry as registry

from adaptive_batching._plan import Need
from adaptive_batching._torchtune.losses import fake_quantized, next_token
from adaptive_batching._torchtune.on_paper import RECIPES
from adaptive_batching._torchtune.planning import Plan, Question, TooLongError, sketch

CONFIGS = Path(torchtune.__file__).parent.parent / "recipes" / "configs"
LENGTHS = (512, 1024, 2048, 4096, 8192)  # tokens of a sample in a table
BATCHES = (1, 2, 4, 8, 16, 32)  # samples of a forward in a table

_CHUNKED = "torchtune.modules.loss.CEWithChunkedOutputLoss"
_PAGED = "bitsandbytes.optim.PagedAdamW8bit"
_TRAIN_ALL = (
    "full_finetune_single_device", "full_finetune_distributed", "full_dpo_distributed", "qat_distributed",
)  # fmt: skip
_COMPILE_NOTHING = ("lora_dpo_distributed", "qat_distributed", "qat_lora_finetune_distributed")
_CORES = os.cpu_count() or 1
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["adaptive_batching._torchtune.plan_process"])


@dataclass(frozen=True)
class Lever:
    """A change that saves memory."""

    name: str
    paste: str  # what to add to the command line
    question: Question
    length: int


def levers(question: Question, length: int) -> Iterator[Lever]:
    """Yield the changes that ``question`` leaves, in no order, for samples of ``length`` tokens."""
    cfg, recipe = question.cfg, question.recipe
    changes = [*_of_activations(question), *_of_optimizer(question)]
    if recipe in _TRAIN_ALL:
        changes += _with_adapters(question, quantized=False)
    is_quantized = "qlora" in str(cfg.model["_component_"]) or bool(cfg.model.get("quantize_base", False))
    if not is_quantized and "qat" not in recipe:
        changes += _with_adapters(question, quantized=True)
    for name, paste, changed in changes:
        yield Lever(name, paste, changed, length)
    if length >= 256:
        yield Lever("shorter samples", f"tokenizer.max_seq_len={length // 2}", question, length // 2)
    if not recipe.endswith("single_device"):
        more = replace(question, devices=question.devices * 2)
        yield Lever("more devices", f"--nproc_per_node {more.devices}", more, length)


def _of_activations(question: Question) -> Iterator[tuple[str, str, Question]]:
    """Yield names, what to paste, and the runs that it makes."""
    cfg, recipe = question.cfg, question.recipe
    checkpoints = bool(cfg.get("enable_activation_checkpointing", False))
    checkpointed, paste = question.changed(enable_activation_checkpointing=True), "enable_activation_checkpointing=True"
    if not checkpoints:
        yield "activation checkpointing", paste, checkpointed
    cannot_offload = "vision" in str(cfg.model["_component_"]) or recipe.startswith("knowledge")
    if not cfg.get("enable_activation_offloading", False) and not cannot_offload:
        name = "activation offloading" if checkpoints else "activation checkpointing and offloading"
        paste = "enable_activation_offloading=True" + ("" if checkpoints else f" {paste}")
        yield name, paste, checkpointed.changed(enable_activation_offloading=True)
    if not cfg.get("compile", False) and recipe not in _COMPILE_NOTHING:
        yield "compile", "compile=True", question.changed(compile=True)
    if cfg.loss["_component_"] != _CHUNKED and RECIPES[recipe] in (next_token, fake_quantized):
        yield "chunked loss", f"loss._component_={_CHUNKED}", question.changed(loss={"_component_": _CHUNKED})


def _of_optimizer(question: Question) -> Iterator[tuple[str, str, Question]]:
    cfg, recipe = question.cfg, question.recipe
    component = str(cfg.optimizer["_component_"])
    of_torch = component.startswith("torch.optim.")
    cannot = recipe not in _TRAIN_ALL or recipe == "full_dpo_distributed"
    if not cannot and not cfg.get("optimizer_in_bwd", False):
        paste = "optimizer_in_bwd=True"
        paste += "" if cfg.get("clip_grad_norm") is None else " clip_grad_norm=null"
        paste += "" if cfg.get("gradient_accumulation_steps", 1) == 1 else " gradient_accumulation_steps=1"
        changed = question.changed(optimizer_in_bwd=True, clip_grad_norm=None, gradient_accumulation_steps=1)
        yield "optimizer in the backward pass", paste, changed
    fuses = any(each in component for each in ("Adam", "SGD", "Adagrad"))
    if of_torch and fuses and not cfg.optimizer.get("fused", False):
        changed = question.changed(optimizer__fused=True, optimizer__foreach=None)
        yield "fused optimizer", "optimizer.fused=True", changed
    # FSDP's sharded parameters are not for bitsandbytes
    if of_torch and "Adam" in component and recipe == "full_finetune_single_device":
        optimizer = {"_component_": _PAGED, "lr": cfg.optimizer.get("lr", 2e-5)}
        yield "8-bit optimizer", f"optimizer._component_={_PAGED}", question.changed(optimizer=optimizer)


def _with_adapters(question: Question, *, quantized: bool) -> Iterator[tuple[str, str, Question]]:
    """Yield the run with the adapters that a stock config gives the same model."""
    builder = str(question.cfg.model["_component_"]).rpartition(".")
    base = builder[2].removeprefix("lora_").removeprefix("qlora_")
    wanted = f"{builder[0]}.{'qlora_' if quantized else 'lora_'}{base}"
    recipe = question.recipe.replace("full_", "lora_", 1).replace("qat_distributed", "qat_lora_finetune_distributed")
    knows_no_quantized = recipe == question.recipe and recipe.startswith(("lora_dpo", "knowledge"))
    listed = "lora_finetune_single_device" if knows_no_quantized else recipe  # any recipe with adapters takes a model
    for config in [config for stock in registry.get_all_recipes() if stock.name == listed for config in stock.configs]:
        if Path(config.file_path).is_absolute():  # one of ours
            continue
        other = OmegaConf.load(CONFIGS / config.file_path)
        assert isinstance(other, DictConfig)
        if other.model["_component_"] != wanted or other.model.get("use_dora", False):
            continue
        if recipe == question.recipe:  # from LoRA to QLoRA
            model = {**question.cfg.model, "_component_": wanted}
            changed, paste = question.changed(model=model), f"model._component_={wanted}"
        else:
            size = question.cfg.batch_size
            changed = replace(question, recipe=recipe, cfg=other).changed(batch_size=size)
            paste = f"adaptive-batching run {recipe} --config {config.name} batch_size={size}"
        yield "QLoRA" if quantized else "LoRA", paste, changed
        return


def start_processes() -> None:
    """Start the process that others are forked from. What it imports takes seconds, in which this one can go on."""
    if _CORES > 1:
        forkserver.ensure_running()


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its kind."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def pull_levers(plan: Plan) -> list[dict[str, Any]]:
    """Return what each lever saves and the largest batch with it, best first."""
    found = _in_parallel(_pulled, [(lever, plan.need) for lever in levers(plan.made.question, plan.made.length)])
    return sorted(found, key=lambda each: -(each["saved_bytes"] if each["saved_bytes"] is not None else -(2**62)))


def _pulled(task: tuple[Lever, Need]) -> dict[str, Any]:
    lever, before = task
    found: dict[str, Any] = {"name": lever.name, "paste": lever.paste, "saved_bytes": None, "reserved_bytes": None,
                             "largest_micro_batch": None, "sequence_length": lever.length, "reason": None}  # fmt: skip
    try:
        made = sketch(lever.question, lever.length)
        found["reserved_bytes"] = made.forecast.need(before.batch_size).reserved.by_default
        found["saved_bytes"] = before.reserved.by_default - found["reserved_bytes"]
        found["largest_micro_batch"] = made.largest
    except Exception as error:  # whatever stock refuses or a trace cannot follow
        found["reason"] = first_line(error)[:200]
    return found


def over_lengths(question: Question, longest: int | None = None) -> list[dict[str, Any]]:
    """Return what forwards need at each length that the model takes, up to ``longest`` tokens if that is known.

    That is the least forward that the config asks for, those of :data:`BATCHES`, and the largest that fits.
    """
    lengths = LENGTHS if longest is None else (*(length for length in LENGTHS if length < longest), longest)
    found = _in_parallel(_at_length, [(question, length) for length in lengths])
    return [each for each in found if each is not None]


def _at_length(task: tuple[Question, int]) -> dict[str, Any] | None:
    question, length = task
    try:
        made = sketch(question, length)
    except TooLongError:
        return None
    return {
        "sequence_length": length,
        "batch_size": made.asked,
        "needed_bytes": made.forecast.most_bytes(made.asked),
        "needed_by_batch": {str(batch): made.forecast.most_bytes(batch) for batch in BATCHES},
        "largest_micro_batch": made.largest,
    }


def _in_parallel(function: Callable[[Any], Any], tasks: Sequence[Any]) -> list[Any]:
    workers = min(_CORES, len(tasks), 4)  # each takes some hundred MiB
    if workers < 2:
        return [function(task) for task in tasks]
    with ProcessPoolExecutor(workers, mp_context=_PROCESSES) as pool:
        return list(pool.map(function, tasks))
