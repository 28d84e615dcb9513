"""Measure the gradient noise scale of a recipe while it trains."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from omegaconf import DictConfig
from torch.distributed.tensor import DTensor

from adaptive_batching.config import ConfigError
from adaptive_batching.growth.noise_scale import NoiseEstimate, NoiseScale
from adaptive_batching.torchtune.cutting import MicroBatch, count_labels

log = logging.getLogger(__name__)


# Of the samples of a step that is cut by length, the part whose gradient is compared with that of all. The smaller it
# is, the surer is what it shows, and the more padding it takes; in a simulation, from a quarter down little
# was gained.
PART = 0.25


class NoiseMeter:
    """Takes the norms of gradients in every few optimizer steps.

    Micro-batches that hold the samples as they come are groups drawn alike. On one device, hooks see the gradient of
    each parameter before it is added to those of earlier micro-batches. Where FSDP2 shards the model, a rank's gradient
    is the input of its reduce-scatters.

    Micro-batches cut by length are not alike. There the first samples of the step run before the rest, each of the two
    parts cut by length, and the gradient gathered up to then is compared with the whole.

    Args:
        recipe: A recipe that has been set up.
        every: Optimizer steps from one measurement to the next.
    """

    def __init__(self, recipe: Any, every: int) -> None:
        self._recipe = recipe
        self._every = every
        steps = recipe.reference_steps_per_epoch
        # 0.99 for each step, as is usual, and less where an epoch has so few steps that it would be over before
        self.scale = NoiseScale(window=max(min(100, steps / 5) / every, 5))
        self._measures = False
        self._warned = False
        self._groups: list[tuple[torch.Tensor, float]] = []
        self._apart = False
        self._part = (0.0, 0.0)  # squared norm of this rank's share of the gradient, targets of its samples
        self._norm_squared = 0.0

    def start_step(self, step: int) -> None:
        """An optimizer step begins, the ``step``-th of the run."""
        self.forget()
        self._measures = step % self._every == 0

    def forget(self) -> None:
        """The step is broken off: what runs instead is cut otherwise."""
        self._measures = False
        self._groups = []
        self._apart = False
        self._part = (0.0, 0.0)

    @property
    def measures(self) -> bool:
        """Whether this step is measured."""
        return self._measures

    def samples_apart(self, window: int) -> int:
        """How many of the ``window`` samples of a step that is cut by length are to run before the others; 0: none,
        as a single sample can only be compared with those of other devices."""
        first = min(max(round(PART * window), 1), window - 1)
        self._apart = first > 0
        return first

    def min_parts(self, num_batches: int) -> int:
        """Into how many micro-batches each of ``num_batches`` has to be cut, so that there are two to compare."""
        return 2 if num_batches * self._recipe.num_replicas < 2 else 1

    @contextlib.contextmanager
    def watch(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Inside, ``micro_batch`` runs forward and backward."""
        if not self._measures or self._apart or micro_batch.is_filler:
            yield
            return
        if self._recipe.collectives is not None:
            with self._recipe.collectives.squared_norms() as squares:
                yield
        else:
            with _squared_norms(self._recipe._model) as squares:
                yield
        weight = micro_batch.weight
        if weight is None:
            weight = float(count_labels(self._recipe, micro_batch.samples))
        if squares and weight > 0:
            self._groups.append((torch.stack(squares).sum(), weight))

    def see_part(self, micro_batches: Sequence[MicroBatch]) -> None:
        """The samples that run before the others have run, in these ``micro_batches`` on this rank."""
        # FSDP has taken the mean over ranks
        square = self._gradient_here() * self._recipe.ranks.size**2
        self._part = (square, sum(micro_batch.weight or 0.0 for micro_batch in micro_batches))

    def see_gradient(self) -> None:
        """The step's mean gradient is complete, and not clipped yet."""
        if self._measures:
            self._norm_squared = self._gradient_here()

    def step_done(self, num_tokens: torch.Tensor, num_samples: int) -> NoiseEstimate | None:
        """The optimizer step is done; returns what was measured in it.

        Args:
            num_tokens: Targets of the step, on all devices.
            num_samples: Samples of the step, on all devices.
        """
        if not self._measures:
            return None
        here = (
            len(self._groups),
            sum(float(square) / weight for square, weight in self._groups),
            sum(weight for _, weight in self._groups),
            *self._part,
            self._norm_squared,
        )
        groups, small, in_groups, part, in_part, big = map(sum, zip(*self._recipe.ranks.gather(here), strict=True))
        self.forget()
        if groups > 1:
            shown = NoiseEstimate.of_groups(int(groups), small / in_groups, big, in_groups, num_samples)
        elif 0 < in_part < (tokens := float(num_tokens)):
            shown = NoiseEstimate.of_part(part / in_part**2, in_part, big, tokens, num_samples)
        else:
            if not self._warned:
                log.warning("the gradient noise scale is not measured: a step has no two micro-batches with targets")
            self._warned = True
            return None
        self.scale.add(shown)
        return shown

    def _gradient_here(self) -> float:
        """Squared norm of the gradient, or of this rank's shard of it; the ranks' add up to that of the whole."""
        grads = [p.grad for p in self._recipe._model.parameters() if p.grad is not None]
        squares = [_square(grad.to_local() if isinstance(grad, DTensor) else grad) for grad in grads]
        return float(torch.stack(squares).sum()) if squares else 0.0


def check_that_noise_can_be_measured(cfg: DictConfig, reader: str) -> None:
    """Refuse what leaves nothing to compare; ``reader`` is what needs the noise scale.

    Raises:
        ConfigError: If it is set.
    """
    what = f"the gradient noise scale, which {reader} needs, cannot be measured"
    if cfg.get("optimizer_in_bwd", False):
        raise ConfigError(
            f"{what} with optimizer_in_bwd=True: a step has one gradient, and there is nothing to compare it with; set "
            f"optimizer_in_bwd=False"
        )
    if cfg.get("tensor_parallel_dim", 1) > 1:
        raise ConfigError(f"{what} with tensor_parallel_dim={cfg.tensor_parallel_dim}; set it to 1")


@contextlib.contextmanager
def _squared_norms(model: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """Of the gradients that backward gives the parameters inside; there is one for each."""
    squares: list[torch.Tensor] = []
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hooks: list[Any] = []
    for parameter in trained:
        hooks.append(parameter.register_hook(lambda grad: squares.append(_square(grad))))  # type: ignore[no-untyped-call]
    try:
        yield squares
    finally:
        for hook in hooks:
            hook.remove()


def _square(tensor: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float32)
    return norm**2
