"""Measure the gradient noise scale while training."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from omegaconf import DictConfig
from torch.distributed.tensor import DTensor

from adaptive_batching._growth.noise_scale import NoiseEstimate, NoiseScale
from adaptive_batching._torchtune.stock.host import Host
from adaptive_batching._torchtune.train.splitting import MicroBatch
from adaptive_batching._values import ConfigError

log = logging.getLogger(__name__)

# Of the samples of a step that is split by length, the part whose gradient is compared with that of all. The smaller it
# is, the surer is what it shows, and the more padding it takes; in a simulation, from a quarter down little was gained.
PART = 0.25


class NoiseMeter:
    """Takes the norms of gradients every few optimizer steps.

    Micro-batches that hold the samples as they come are groups drawn alike. On one device, hooks see the gradient of
    each parameter before it is added to earlier ones; where FSDP2 shards the model, a rank's gradient is the input of
    its reduce-scatters. Micro-batches split by length are not alike: the first samples of the step run before the rest,
    each of the two parts split by length, and the gradient gathered up to then is compared with the whole.
    """

    def __init__(self, host: Host, every: int, steps_per_epoch: int) -> None:
        self._host, self._every = host, every
        # 0.99 for each step, as is usual, and less where an epoch has so few steps that it would be over before
        self.scale = NoiseScale(window=max(min(100, steps_per_epoch / 5) / every, 5))
        self._warned = False
        self._norm_squared = 0.0
        self.forget()

    def start_step(self, step: int) -> None:
        self.forget()
        self.measures = step % self._every == 0

    def forget(self) -> None:
        """Do not measure a step that is broken off: its samples run again, split differently."""
        self.measures = False
        self._groups: list[tuple[torch.Tensor, float]] = []
        self._apart = False
        self._part = (0.0, 0.0)  # squared norm of this rank's share of the gradient, targets of its samples

    def samples_apart(self, window: int) -> int:
        """Return how many of the ``window`` samples of a step that is split by length run before the others.

        0 for a single sample, which can only be compared with those of other devices.
        """
        first = min(max(round(PART * window), 1), window - 1)
        self._apart = first > 0
        return first

    def min_parts(self, num_batches: int) -> int:
        """Return the least number of parts of each of ``num_batches``, so that there are two to compare."""
        return 2 if num_batches * self._host.num_replicas < 2 else 1

    @contextlib.contextmanager
    def watch(self, micro_batch: MicroBatch) -> Iterator[None]:
        if not self.measures or self._apart or micro_batch.is_filler:
            yield
            return
        collectives = self._host.collectives
        with _squared_norms(self._host.model) if collectives is None else collectives.squared_norms() as squares:
            yield
        weight = micro_batch.weight
        if weight is None:
            weight = float(self._host.objective.counts(micro_batch.samples).tokens)
        if squares and weight > 0:
            self._groups.append((torch.stack(squares).sum(), weight))

    def see_part(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Measure the part that runs before the others; it has run, in these ``micro_batches`` on this rank."""
        square = self._gradient_here() * self._host.ranks.size**2  # FSDP has taken the mean over ranks
        self._part = (square, sum(micro_batch.weight or 0.0 for micro_batch in micro_batches))

    def see_gradient(self) -> None:
        """Measure the step's mean gradient, which is complete and not clipped yet."""
        if self.measures:
            self._norm_squared = self._gradient_here()

    def estimate(self, num_tokens: torch.Tensor, num_samples: int) -> NoiseEstimate | None:
        """Return the estimate from the step that is done; targets and samples are those of all devices."""
        if not self.measures:
            return None
        weights = [weight for _, weight in self._groups]
        small_here = sum(float(square) / weight for square, weight in self._groups)
        here = (len(weights), small_here, sum(weights), *self._part, self._norm_squared)
        groups, small, in_groups, part, in_part, big = map(sum, zip(*self._host.ranks.gather(here), strict=True))
        self.forget()
        if groups > 1:
            shown = NoiseEstimate.of_groups(int(groups), small / in_groups, big, in_groups, num_samples)
        elif 0 < in_part < (tokens := float(num_tokens)):
            shown = NoiseEstimate.of_part(part / in_part**2, in_part, big, tokens, num_samples)
        else:
            if not self._warned:
                log.warning("the gradient noise scale is not measured: a step needs two micro-batches with targets")
            self._warned = True
            return None
        self.scale.add(shown)
        return shown

    def _gradient_here(self) -> float:
        """Return the squared norm of the gradient, or of this rank's shard; those of all ranks add up to the whole."""
        grads = [p.grad for p in self._host.model.parameters() if p.grad is not None]
        squares = [_square(grad.to_local() if isinstance(grad, DTensor) else grad) for grad in grads]
        return float(torch.stack(squares).sum()) if squares else 0.0


def check_that_noise_can_be_measured(cfg: DictConfig, reader: str) -> None:
    """Refuse settings that leave nothing to compare; ``reader`` names what needs the noise scale."""
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
    """Collect the squared norms of the gradients that backward gives each parameter inside."""
    squares: list[torch.Tensor] = []
    with contextlib.ExitStack() as hooks:
        for parameter in filter(lambda weight: weight.requires_grad, model.parameters()):
            hook: Any = parameter.register_hook(lambda grad: squares.append(_square(grad)))  # type: ignore[no-untyped-call]
            hooks.callback(hook.remove)
        yield squares


def _square(tensor: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float32)
    return norm**2
