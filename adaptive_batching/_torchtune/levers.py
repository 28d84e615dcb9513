"""What would help a run that takes too much: each change of its config, with the override to paste."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torchtune
from omegaconf import DictConfig, OmegaConf
from torchtune import _recipe_registry as registry

from adaptive_batching._torchtune.next_token import fake_quantized, next_token
from adaptive_batching._torchtune.on_paper import RECIPES
from adaptive_batching._torchtune.planning import Question

CONFIGS = Path(torchtune.__file__).parent.parent / "recipes" / "configs"
_CHUNKED = "torchtune.modules.loss.CEWithChunkedOutputLoss"
_PAGED = "bitsandbytes.optim.PagedAdamW8bit"
_TRAIN_ALL = (
    "full_finetune_single_device", "full_finetune_distributed", "full_dpo_distributed", "qat_distributed",
)  # fmt: skip
_COMPILE_NOTHING = ("lora_dpo_distributed", "qat_distributed", "qat_lora_finetune_distributed")


@dataclass(frozen=True)
class Lever:
    """A change that saves memory."""

    name: str
    paste: str
    """What to add to the command line."""

    question: Question
    length: int


def levers(question: Question, length: int) -> Iterator[Lever]:
    """Yield the changes that ``question`` leaves, in no order, for samples of ``length`` tokens."""
    cfg, recipe = question.cfg, question.recipe
    full, single = recipe in _TRAIN_ALL, recipe.endswith("single_device")
    checkpoints = bool(cfg.get("enable_activation_checkpointing", False))
    in_backward = bool(cfg.get("optimizer_in_bwd", False))

    def lever(name: str, paste: str, **keys: object) -> Lever:
        return Lever(name, paste, question.changed(**keys), length)

    if not checkpoints:
        paste = "enable_activation_checkpointing=True"
        yield lever("activation checkpointing", paste, enable_activation_checkpointing=True)
    cannot_offload = "vision" in str(cfg.model["_component_"]) or recipe.startswith("knowledge")
    if not cfg.get("enable_activation_offloading", False) and not cannot_offload:
        paste = "enable_activation_offloading=True" + ("" if checkpoints else " enable_activation_checkpointing=True")
        name = "activation offloading" if checkpoints else "activation checkpointing and offloading"
        keys = {"enable_activation_offloading": True, "enable_activation_checkpointing": True}
        yield lever(name, paste, **keys)
    if not cfg.get("compile", False) and recipe not in _COMPILE_NOTHING:
        yield lever("compile", "compile=True", compile=True)
    if cfg.loss["_component_"] != _CHUNKED and RECIPES[recipe] in (next_token, fake_quantized):
        yield lever("chunked loss", f"loss._component_={_CHUNKED}", loss={"_component_": _CHUNKED})
    yield from _of_optimizer(question, length, full=full, single=single, in_backward=in_backward)
    if full:
        yield from _with_adapters(question, length, quantized=False)
    if not _is_quantized(cfg) and "qat" not in recipe:
        yield from _with_adapters(question, length, quantized=True)
    if length >= 256:
        yield Lever("shorter samples", f"tokenizer.max_seq_len={length // 2}", question, length // 2)
    if not single:
        more = Question(recipe, cfg, question.devices * 2, question.samples)
        yield Lever("more devices", f"--nproc_per_node {more.devices}", more, length)


def _of_optimizer(question: Question, length: int, *, full: bool, single: bool, in_backward: bool) -> Iterator[Lever]:
    cfg = question.cfg
    component = str(cfg.optimizer["_component_"])
    of_torch = component.startswith("torch.optim.")
    if full and not in_backward and question.recipe != "full_dpo_distributed":  # where stock cannot
        keys = {"optimizer_in_bwd": True, "clip_grad_norm": None, "gradient_accumulation_steps": 1}
        set_already = {"clip_grad_norm": cfg.get("clip_grad_norm") is None}
        set_already["gradient_accumulation_steps"] = cfg.get("gradient_accumulation_steps", 1) == 1
        shown = {key: value for key, value in keys.items() if not set_already.get(key, False)}
        paste = " ".join(f"{key}={'null' if value is None else value}" for key, value in shown.items())
        yield Lever("optimizer in the backward pass", paste, question.changed(**keys), length)
    fuses = any(each in component for each in ("Adam", "SGD", "Adagrad"))
    if of_torch and fuses and not cfg.optimizer.get("fused", False):
        changed = question.changed(optimizer__fused=True, optimizer__foreach=None)
        yield Lever("fused optimizer", "optimizer.fused=True", changed, length)
    if of_torch and "Adam" in component and single and full:  # FSDP's sharded parameters are not for bitsandbytes
        optimizer = {"_component_": _PAGED, "lr": cfg.optimizer.get("lr", 2e-5)}
        yield Lever("8-bit optimizer", f"optimizer._component_={_PAGED}", question.changed(optimizer=optimizer), length)


def _with_adapters(question: Question, length: int, *, quantized: bool) -> Iterator[Lever]:
    """Yield the run with the adapters that a stock config gives the same model."""
    builder = str(question.cfg.model["_component_"]).rpartition(".")
    base = builder[2].removeprefix("lora_").removeprefix("qlora_")
    wanted = f"{builder[0]}.{'qlora_' if quantized else 'lora_'}{base}"
    recipe = question.recipe.replace("full_", "lora_", 1).replace("qat_distributed", "qat_lora_finetune_distributed")
    knows_no_quantized = recipe == question.recipe and recipe.startswith(("lora_dpo", "knowledge"))
    listed = "lora_finetune_single_device" if knows_no_quantized else recipe  # any recipe with adapters takes a model
    for stock in registry.get_all_recipes():
        for config in stock.configs if stock.name == listed else []:
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
                changed = Question(recipe, other, question.devices, question.samples).changed(batch_size=size)
                paste = f"adaptive-batching run {recipe} --config {config.name} batch_size={size}"
            yield Lever("QLoRA" if quantized else "LoRA", paste, changed, length)
            return


def _is_quantized(cfg: DictConfig) -> bool:
    return "qlora" in str(cfg.model["_component_"]) or bool(cfg.model.get("quantize_base", False))
