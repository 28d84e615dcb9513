"""A stock recipe as the rest of this package sees it: the only reader of the private attributes of its state."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.optim import Optimizer
from torchtune.training.checkpointing import DistributedCheckpointer

from adaptive_batching._ranks.agree import Ranks
from adaptive_batching._ranks.fsdp import MicroBatchCollectives, is_sharded
from adaptive_batching._state import Reported, State
from adaptive_batching._torchtune.stock.data import SampleLoader
from adaptive_batching._torchtune.stock.end_to_end import RowSeams
from adaptive_batching._torchtune.stock.objective import Objective, StockParts


class OptimizersInBackward:
    """Lets the optimizers of a model step in its backward passes, as stock's hooks do in every one, or holds them back.

    Held back, gradients add up over micro-batches, until the last backward. That takes the memory which stepping in
    the backward pass saves; only a batch that is split has to pay it.
    """

    def __init__(self) -> None:
        self.updated = False  # True once a parameter is, after which a step that runs out of memory cannot run again
        self._times_closed = 0
        self._optimizers: dict[Any, Optimizer] = {}

    def register(self, model: nn.Module, optim_dict: Mapping[torch.nn.Parameter, Optimizer]) -> None:
        """Take the place of torchtune's ``register_optim_in_bwd_hooks``."""
        self._optimizers = dict(optim_dict)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._step)  # type: ignore[no-untyped-call]

    def release(self) -> None:
        """Let go of the optimizers, which their parameters would hold for good: no hook of theirs is ever collected."""
        self._optimizers = {}

    @property
    def optimizers(self) -> list[Optimizer]:
        return list(self._optimizers.values())

    def optimizer_of(self, parameter: torch.Tensor) -> Optimizer:
        return self._optimizers[parameter]

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        self._times_closed += 1
        try:
            yield
        finally:
            self._times_closed -= 1

    def flush(self) -> None:
        """Step the parameters that have a gradient of earlier micro-batches, and none of the last."""
        for parameter in self._optimizers:
            if parameter.grad is not None:
                self._step(parameter)

    def _step(self, parameter: torch.Tensor) -> None:
        if self._times_closed == 0:
            self.updated = True
            self._optimizers[parameter].step()
            self._optimizers[parameter].zero_grad()


@dataclass(frozen=True)
class Host:
    """The parts of a recipe that a training step needs."""

    name: str  # of the recipe's class
    objective: Objective
    model: nn.Module
    optimizers: Sequence[Optimizer]  # one; with optimizers in the backward pass, one for each parameter
    loader: SampleLoader
    device: torch.device
    ranks: Ranks
    losses: Mapping[str, Any] = field(default_factory=dict)  # as configured, by name
    reported: Reported = field(default_factory=Reported)
    num_replicas: int = 1  # ranks that see different samples; fewer than all ranks under tensor parallelism
    clip_norm: float | None = None
    backward_optimizers: OptimizersInBackward | None = None  # of optimizers that step in the backward pass
    collectives: MicroBatchCollectives | None = None  # of a sharded model, which a rank can issue for the others
    tensor_parallel: bool = False
    why_no_recovery: str = ""  # of several ranks, if they cannot recover
    is_compiled: bool = False
    checkpoints_activations: bool = False
    offloads_activations: bool = False
    max_length: int | None = None  # tokens that the tokenizer truncates samples to
    rows: RowSeams | None = None  # where models take rows of samples end to end, if they do

    @functools.cached_property
    def steps_in_backward(self) -> bool:
        return self.backward_optimizers is not None

    @functools.cached_property
    def taking_rows(self) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """Returns a context in which the models take rows of samples, if they do at all."""
        return contextlib.nullcontext if self.rows is None else self.rows.open

    @property
    def models(self) -> list[nn.Module]:
        return [self.model, *self.objective.frozen_models]

    @property
    def state(self) -> State:
        """The state that the user's code may change: of models, the loss, and a collate function that draws."""
        return State(
            self.models, losses=self.losses, draws=[self.loader.collate], reported=self.reported,
            how_to_declare="keep the values in buffers of the loss or the model",
        )  # fmt: skip

    @property
    def samples_per_rank(self) -> int:
        return len(self.loader.sampler)


@dataclass(frozen=True)
class MemoryHistory:
    """Batches of the first epoch during which CUDA's allocations are recorded for the profiler, as stock does."""

    first: int
    last: int


@dataclass(frozen=True)
class StockRun:
    """The run as stock's set-up has laid it out, at the configured batch size."""

    batch_size: int
    accumulation: int  # batches of an optimizer step
    epochs: int
    steps_per_epoch: int
    max_steps_per_epoch: int | None = None
    first_epoch: int = 0
    first_step: int = 0
    scheduler: Any = None
    rates: tuple[float, ...] = (1.0,)  # learning rate before each step of the whole run, and after the last
    log_every: int = 1
    logs_peak_memory: bool = False
    profiler: Any = None
    profiles_steps: bool = False  # a step of the profiler is an optimizer step rather than a batch
    memory_history: MemoryHistory | None = None

    @property
    def window(self) -> int:
        """Samples of an optimizer step on one replica."""
        return self.batch_size * self.accumulation


class TrainingHooks(Protocol):
    """Takes what stock itself must see of a run: its progress, its metrics and the moments to save it."""

    def note_progress(self, *, epochs_run: int, global_step: int, steps_per_epoch: int) -> None: ...

    def log_metrics(self, metrics: dict[str, Any], step: int) -> None: ...

    def save_epoch(self, epoch: int, *, is_last: bool) -> None: ...

    def save_step(self, step: int, *, is_last: bool) -> None: ...

    def learning_rate(self) -> float: ...


def host_of(
    recipe: Any,
    ranks: Ranks,
    backward_optimizers: OptimizersInBackward,
    make_objective: Callable[[StockParts], Objective],
) -> Host:
    loader: SampleLoader = recipe._dataloader
    clip_norm = getattr(recipe, "_clip_grad_norm", None)
    return Host(
        name=type(recipe).__name__,
        objective=make_objective(parts_of(recipe, ranks, loader)),
        model=recipe._model,
        optimizers=optimizers_of(recipe),
        loader=loader,
        device=recipe._device,
        ranks=ranks,
        losses={"loss": recipe._loss_fn, "kd_loss": getattr(recipe, "_kd_loss_fn", None)},
        num_replicas=int(getattr(recipe, "dp_size", ranks.size)),
        tensor_parallel=getattr(recipe, "tensor_parallel_dim", 1) > 1,
        clip_norm=None if clip_norm is None else float(clip_norm),
        backward_optimizers=backward_optimizers if _steps_in_backward(recipe) else None,
        is_compiled=bool(getattr(recipe, "_compile", getattr(recipe, "_model_compile", False))),
        checkpoints_activations=any(isinstance(module, CheckpointWrapper) for module in recipe._model.modules()),
        offloads_activations=getattr(recipe, "_enable_activation_offloading", False),
        max_length=getattr(recipe._tokenizer, "max_seq_len", None),
    )


def parts_of(recipe: Any, ranks: Ranks, loader: SampleLoader) -> StockParts:
    return StockParts(
        collate=loader.collate,
        loss=recipe._loss_fn,
        activations=getattr(recipe, "activations_handling_ctx", contextlib.nullcontext()),
        num_chunks=_gathered_chunks(recipe._model),
        frozen=getattr(recipe, "_ref_model", getattr(recipe, "_teacher_model", None)),
        teacher_loss=getattr(recipe, "_kd_loss_fn", None),
        teacher_share=float(getattr(recipe, "_kd_ratio", 0.0)),
        num_ranks=ranks.size,
        model=recipe._model,
        fake_quantized_from=getattr(recipe, "_fake_quant_after_n_steps", None),
        quantizer_mode=getattr(recipe, "_quantizer_mode", None),
    )


def run_of(recipe: Any, configured_batch_size: int, rates: Sequence[float]) -> StockRun:
    history = None
    # Only the first rank of a stock recipe knows its profiler's settings.
    if getattr(recipe, "profiler_profile_memory", False) and recipe._device.type == "cuda":
        first = recipe.profiler_wait_steps + recipe.profiler_warmup_steps
        history = MemoryHistory(first, first + recipe.profiler_active_steps)
    return StockRun(
        batch_size=configured_batch_size,
        accumulation=recipe._gradient_accumulation_steps,
        epochs=recipe.total_epochs,
        steps_per_epoch=recipe._steps_per_epoch,
        max_steps_per_epoch=recipe.max_steps_per_epoch,
        first_epoch=recipe.epochs_run,
        first_step=recipe.global_step,
        scheduler=getattr(recipe, "_lr_scheduler", None),
        rates=tuple(rates),
        log_every=recipe._log_every_n_steps,
        logs_peak_memory=recipe._log_peak_memory_stats and recipe._device.type != "cpu",
        profiler=getattr(recipe, "_profiler", None),
        profiles_steps=getattr(recipe, "profiles_steps", False),
        memory_history=history,
    )


def optimizers_of(recipe: Any) -> list[Optimizer]:
    return list(recipe._optim_ckpt_wrapper.optim_map.values()) if _steps_in_backward(recipe) else [recipe._optimizer]


def groups_of(recipe: Any) -> list[dict[str, Any]]:
    return [group for optimizer in optimizers_of(recipe) for group in optimizer.param_groups]


def learning_rate_holder(recipe: Any) -> Any:
    return recipe._optim_ckpt_wrapper if _steps_in_backward(recipe) else recipe._optimizer


def model_in_checkpoint(recipe: Any) -> nn.Module | None:
    """Return the model if saving a checkpoint changes its weights; else None.

    Stock merges LoRA's adapters into ``tensor.cpu()``, which on the cpu is the tensor that is being trained.
    """
    # Distillation merges even what it then leaves out.
    merges = hasattr(recipe, "_teacher_model") or not getattr(recipe, "_save_adapter_weights_only", True)
    model: nn.Module = recipe._model
    return model if merges and recipe._device.type == "cpu" and not is_sharded(model) else None


def checkpointer_of(recipe: Any) -> Any:
    client = getattr(recipe, "_checkpoint_client", None)
    return recipe._checkpointer if client is None else client._get_checkpointer()


def saves_on_every_rank(recipe: Any) -> bool:
    """True for distributed checkpoints, whose folders all ranks write to."""
    return isinstance(checkpointer_of(recipe), DistributedCheckpointer)


def initial_learning_rate(recipe: Any) -> float:
    """Return the learning rate that the schedule starts from, on resume as well."""
    group = groups_of(recipe)[0]
    return float(group.get("initial_lr", group["lr"]))


def _steps_in_backward(recipe: Any) -> bool:
    return bool(getattr(recipe, "_optimizer_in_bwd", False))  # the LoRA recipes do not know the option


def _gathered_chunks(model: nn.Module) -> int:
    """Return the chunks of tokens for each of which a forward gathers an output layer that is sharded on its own."""
    decoder: Any = getattr(model, "decoder", model)  # of a multimodal model
    output = getattr(decoder, "output", None)
    on_its_own = isinstance(output, nn.Module) and is_sharded(output)
    return int(getattr(decoder, "num_output_chunks", 0)) if on_its_own else 0
