"""Settings that would save memory and that a config does not use yet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from adaptive_batching._torchtune.names import PLANNED, recipes, recipes_folder
from adaptive_batching._torchtune.stock.less_memory import of_activations

_CHUNKED = "torchtune.modules.loss.CEWithChunkedOutputLoss"
_PAGED = "bitsandbytes.optim.PagedAdamW8bit"
_TRAIN_ALL = ("full_finetune_single_device", "full_finetune_distributed", "full_dpo_distributed", "qat_distributed")
_COMPILE_NOTHING = ("lora_dpo_distributed", "qat_distributed", "qat_lora_finetune_distributed")


@dataclass(frozen=True)
class Lever:
    """A change of a run that saves memory."""

    name: str
    paste: str
    """To add to the command line, or what to run in its place."""
    recipe: str
    config: str
    overrides: tuple[str, ...]
    length: int
    devices: int


@dataclass(frozen=True)
class Planned:
    """A run that is planned."""

    recipe: str
    config: str
    cfg: Any  # with the overrides
    overrides: tuple[str, ...]
    length: int
    devices: int

    def changed(self, name: str, paste: str) -> Lever:
        """Return a lever that adds overrides."""
        return self.other(name, paste, overrides=(*self.overrides, *paste.split()))

    def other(self, name: str, paste: str, **changed: Any) -> Lever:
        """Return a lever that changes fields of a run."""
        fields = {key: getattr(self, key) for key in ("recipe", "config", "overrides", "length", "devices")}
        return Lever(name, paste, **{**fields, **changed})


def levers(run: Planned) -> Iterator[Lever]:
    """Yield what the recipe of a run knows and its config does not use, those that cost least first."""
    recipe, model = run.recipe, run.cfg.model
    for name, paste in _of_config(run):
        yield run.changed(name, paste)
    is_quantized = "qlora" in str(model["_component_"]) or bool(model.get("quantize_base", False))
    kinds = ["LoRA"] if recipe in _TRAIN_ALL else []
    kinds += [] if is_quantized or "qat" in recipe else ["QLoRA"]
    for name in kinds:
        yield from _with_adapters(run, name)
    if run.length >= 256:
        half = run.length // 2
        yield run.other("shorter samples", f"tokenizer.max_seq_len={half}", length=half)
    if run.devices > 1:
        more = run.devices * 2
        yield run.other("more devices", f"--nproc_per_node {more}", devices=more)


def _of_config(run: Planned) -> Iterator[tuple[str, str]]:
    cfg, recipe = run.cfg, run.recipe
    yield from of_activations(
        checkpoints=bool(cfg.get("enable_activation_checkpointing")),
        offloads=bool(cfg.get("enable_activation_offloading", False)),
        can_offload=not recipe.startswith("knowledge"),
    )
    if cfg.get("dtype") == "fp32":
        yield "bfloat16", "dtype=bf16"
    if not cfg.get("compile", False) and recipe not in _COMPILE_NOTHING:
        yield "compile", "compile=True"
    computes_tokens = "_finetune_" in recipe or recipe == "qat_distributed"
    if cfg.loss["_component_"] != _CHUNKED and computes_tokens:
        yield "chunked loss", f"loss._component_={_CHUNKED}"
    if recipe in _TRAIN_ALL and recipe != "full_dpo_distributed" and not cfg.get("optimizer_in_bwd", False):
        paste = "optimizer_in_bwd=True"
        paste += "" if cfg.get("clip_grad_norm") is None else " clip_grad_norm=null"
        paste += "" if cfg.get("gradient_accumulation_steps", 1) == 1 else " gradient_accumulation_steps=1"
        yield "optimizer in the backward pass", paste
    optimizer = str(cfg.optimizer["_component_"])
    if not optimizer.startswith("torch.optim."):
        return
    if any(kind in optimizer for kind in ("Adam", "SGD", "Adagrad")) and not cfg.optimizer.get("fused", False):
        paste = "optimizer.fused=True"
        yield "fused optimizer", paste + (" optimizer.foreach=null" if cfg.optimizer.get("foreach") else "")
    # FSDP's sharded parameters are not for bitsandbytes
    if "Adam" in optimizer and recipe == "full_finetune_single_device":
        yield "8-bit optimizer", f"optimizer._component_={_PAGED}"


def _with_adapters(run: Planned, name: str) -> Iterator[Lever]:
    """Yield the run with the adapters that a stock config gives the same model; nothing if none does."""
    kind, builder = f"{name.lower()}_", str(run.cfg.model["_component_"]).rpartition(".")
    wanted = f"{builder[0]}.{kind}{builder[2].removeprefix('lora_').removeprefix('qlora_')}"
    recipe = run.recipe.replace("full_", "lora_", 1).replace("qat_distributed", "qat_lora_finetune_distributed")
    knows_no_quantized = recipe == run.recipe and recipe.startswith(("lora_dpo", "knowledge"))
    listed = "lora_finetune_single_device" if knows_no_quantized else recipe  # any recipe with adapters takes a model
    if recipe not in PLANNED:
        return
    for config in [config for each in recipes() if each.name == listed for config in each.configs]:
        if str(config.file_path).startswith(str(recipes_folder())):  # one of ours
            continue
        model: Any = OmegaConf.load(config.file_path).model
        if model["_component_"] != wanted or model.get("use_dora", False):
            continue
        if recipe == run.recipe:  # from LoRA to QLoRA
            yield run.changed(name, f"model._component_={wanted}")
        else:
            size = f"batch_size={run.cfg.batch_size}"
            paste = f"adaptive-batching run {recipe} --config {config.name} {size}"
            yield run.other(name, paste, recipe=recipe, config=config.name, overrides=(size,))
        return
