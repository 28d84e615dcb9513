"""A recipe's optimizer step, as the probe runs and traces it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from torch.optim import Optimizer
from torchtune import config, modules, training

from adaptive_batching.micro_batches.batch_dependence import find_batch_dependent_module
from adaptive_batching.micro_batches.run import run_micro_batches
from adaptive_batching.probe.find import Remedy
from adaptive_batching.probe.trace import TRACED_SIZES
from adaptive_batching.probe.trial import Run, TrainingStep
from adaptive_batching.ranks.agree import Ranks
from adaptive_batching.torchtune import compiling
from adaptive_batching.torchtune.data import TEXT_KEYS, Sample, is_multimodal, repeat, stretch
from adaptive_batching.torchtune.gradients import (
    apply_gradients,
    forward_backward,
    in_backward,
    optimizers_of,
    reset_offloading,
    sum_over_ranks,
)
from adaptive_batching.torchtune.gradients import discard as drop_step
from adaptive_batching.torchtune.in_backward import Gate

_NF4_BITS_PER_WEIGHT = 4.127  # 4, an 8-bit scale per 64 weights, a 32-bit one per 256 of these (QLoRA, section 3)


def training_step(recipe: Any, sample: Sample) -> TrainingStep:
    """One optimizer step of ``recipe`` on copies of ``sample``: its loss, collate function and clipping."""

    def make_batch(batch_size: int) -> dict[str, Any]:
        batch: dict[str, Any] = recipe.collate(repeat(sample, batch_size))
        return batch

    def bind(model: nn.Module, optimizers: Sequence[Optimizer]) -> Run:
        target = recipe if model is recipe._model else _stand_in(recipe, model, optimizers)

        def run(batch: dict[str, Any]) -> None:
            # With accumulation, a forward and backward beside the gradients of the last one is the costliest moment.
            cuts = recipe.settings.fills_memory or recipe.settings.micro_batch_size is not None
            measures = recipe.noise_scale_every is not None and recipe.num_replicas == 1  # in two parts at least
            accumulates = recipe._gradient_accumulation_steps > 1 or cuts or measures
            if target is not recipe:
                batch = without_block_mask(batch)

            def run_one(*, is_last: bool) -> torch.Tensor:
                with contextlib.nullcontext() if is_last else target.gate.closed():
                    return forward_backward(target, dict(batch))[1]

            forwards = [partial(run_one, is_last=last) for last in ([False, True] if accumulates else [True])]
            outcome = run_micro_batches(forwards, target.ranks, target.collectives, partial(drop_step, target))
            if outcome.failed:
                raise torch.OutOfMemoryError("out of memory on this rank or another") from outcome.error
            num_tokens = sum(outcome.results[1:], outcome.results[0])
            apply_gradients(target, sum_over_ranks(target, num_tokens))

        return run

    def discard() -> None:
        reset_offloading(recipe)
        compiling.forget(recipe)  # each size is compiled as it would be in training

    return TrainingStep(recipe._model, optimizers_of(recipe), make_batch, bind, discard)


def remedies(recipe: Any, cfg: DictConfig, sample: Sample) -> list[Remedy]:
    """What could make a batch of one sample fit, for the settings of ``recipe`` that are not used yet."""
    step = training_step(recipe, sample)
    found = []
    if not recipe._enable_activation_checkpointing:
        found.append(Remedy("enable_activation_checkpointing=True", step, _checkpoint_activations))
    if not recipe._enable_activation_offloading and recipe._device.type == "cuda":
        found.append(Remedy("enable_activation_offloading=True (with enable_activation_checkpointing=True)"))
    weights = [p for p in recipe._model.parameters() if p.dim() > 1]
    trains_all = all(p.requires_grad for p in weights)
    quantized_bytes = sum(max(p.nbytes - int(p.numel() * _NF4_BITS_PER_WEIGHT / 8), 0) for p in weights)
    if trains_all:
        if not in_backward(recipe) and recipe._gradient_accumulation_steps == 1:
            found.append(
                Remedy("optimizer_in_bwd=True (with clip_grad_norm=null)", _in_backward_step(recipe, cfg, step))
            )
        lora = _frozen_step(recipe, cfg, step)
        found.append(Remedy("LoRA (recipe lora_finetune_single_device)", lora, _freeze_weights))
        found.append(Remedy("QLoRA (LoRA with a qlora_ model)", lora, _freeze_weights, quantized_bytes))
    elif not any("NF4" in type(p).__name__ for p in weights):
        found.append(Remedy("QLoRA (a qlora_ model)", step, None, quantized_bytes))
    length = len(sample["tokens"])
    if set(sample) <= TEXT_KEYS:
        for shorter in (length // 2, length // 4):
            if shorter > 1:
                shorter_step = training_step(recipe, stretch(sample, shorter))
                found.append(Remedy(f"tokenizer.max_seq_len={shorter} (now {length})", shorter_step))
    return found


def batch_dependent_module(recipe: Any) -> str | None:
    """A module of the recipe's model that computes over the batch dimension, or None."""
    tokens = torch.arange(1, 41, device=recipe._device).reshape(5, 8)  # [samples, tokens]; any text will do
    sample = recipe._dataloader.dataset[0]

    def run(batch: torch.Tensor) -> None:
        if not is_multimodal(sample):  # what such a model makes of text alone is its own affair
            recipe._model(tokens=batch)

    return find_batch_dependent_module(recipe._model, run, tokens[[0, 1, 2]], tokens[[0, 3, 4]])


def _stand_in(recipe: Any, model: nn.Module, optimizers: Sequence[Optimizer]) -> Any:
    """A shallow copy of ``recipe`` that trains ``model`` on the cpu, for the trace."""
    target = copy.copy(recipe)
    target.ranks, target.collectives = Ranks(alone=True), None
    target._model = model
    target._device = torch.device("cpu")
    # Large enough for both traced sizes: growing it would be an operation that only one of them has.
    target.ignore_labels_cache = recipe.ignore_labels_cache.cpu()[:1].repeat(max(TRACED_SIZES), 1)
    target.activations_handling_ctx = contextlib.nullcontext()  # offloading needs the device's streams
    if in_backward(recipe):
        by_parameter = {optimizer.param_groups[0]["params"][0]: optimizer for optimizer in optimizers}
        target.gate = Gate()
        target.gate.register(model, by_parameter)
    else:
        target._optimizer = optimizers[0]
    return target


def without_block_mask(batch: dict[str, Any]) -> dict[str, Any]:
    """``batch`` as a trace can take it: flex attention has no fake kernel, and takes a mask of blocks in its place.

    Without the mask attention is causal, in a fused kernel that keeps what flex attention keeps for the backward pass:
    queries, keys, values, the output and a number for each row of scores.
    """
    return {key: value for key, value in batch.items() if not isinstance(value, BlockMask)}


def _checkpoint_activations(model: nn.Module) -> None:
    training.set_activation_checkpointing(model, auto_wrap_policy={modules.TransformerSelfAttentionLayer})


def _freeze_weights(model: nn.Module) -> None:
    """Roughly what LoRA does to memory: matrices are frozen, little else is trained."""
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 1)


def _in_backward_step(recipe: Any, cfg: DictConfig, step: TrainingStep) -> TrainingStep:
    """``step`` as it would be with ``optimizer_in_bwd=True``; for the trace only."""
    changed = copy.copy(recipe)
    changed._optimizer_in_bwd = True
    changed._clip_grad_norm = None

    def bind(model: nn.Module, _: Sequence[Optimizer]) -> Run:
        optimizers = [config.instantiate(cfg.optimizer, [p]) for p in model.parameters()]
        return _run_on(changed, model, optimizers)

    return TrainingStep(step.model, [], step.make_batch, bind)


def _frozen_step(recipe: Any, cfg: DictConfig, step: TrainingStep) -> TrainingStep:
    """``step`` with an optimizer for what is still trainable in the copied model; for the trace only."""
    changed = copy.copy(recipe)
    changed._optimizer_in_bwd = False

    def bind(model: nn.Module, _: Sequence[Optimizer]) -> Run:
        trainable = [p for p in model.parameters() if p.requires_grad]
        return _run_on(changed, model, [config.instantiate(cfg.optimizer, trainable)])

    return TrainingStep(step.model, [], step.make_batch, bind)


def _run_on(recipe: Any, model: nn.Module, optimizers: Sequence[Optimizer]) -> Run:
    target = _stand_in(recipe, model, optimizers)

    def run(batch: dict[str, Any]) -> None:
        apply_gradients(target, forward_backward(target, without_block_mask(batch))[1])

    return run
