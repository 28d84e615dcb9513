"""Data whose gradient covariance per target token is known: every sample has one target, so targets are independent."""

from __future__ import annotations

import random
from typing import Any

import torch

from adaptive_batching._growth.noise_scale import NoiseEstimate
from adaptive_batching._torchtune.stock.host import Host
from adaptive_batching._torchtune.train.gradients import forward_backward

# Five samples to a batch in parts of three and two, two batches to a step: groups of unequal size.
NOISE = [
    "batch_increase_function._component_=adaptive_batching.growth.constant", "~batch_increase_function.every",
    "adaptive_batching.noise_scale_every=1", "adaptive_batching.max_batch_size=5",
    "optimizer._component_=torch.optim.SGD", "optimizer.lr=0.0",  # the gradient stays that of the first weights
    "gradient_accumulation_steps=2", "epochs=1",
]  # fmt: skip


class OneTarget(list[dict[str, Any]]):
    """Random tokens with targets of which some are far more frequent, so that their mean gradient is no noise."""

    def __init__(self, tokenizer: Any = None, samples: int = 600, **ignored: Any) -> None:
        super().__init__()
        chance = random.Random(0)
        for _ in range(samples):
            tokens = [min(int(chance.expovariate(0.2)), 699) for _ in range(chance.randint(6, 20))]
            labels = [-100] * len(tokens)
            labels[chance.randrange(1, len(tokens))] = int(chance.expovariate(1))
            self.append({"tokens": tokens, "labels": labels, "mask": [False] * len(tokens)})


def truth(host: Host) -> tuple[float, float]:
    """Trace of the covariance of a target's gradient, and the squared norm of their mean, over all of the data.

    Steps draw without replacement, so that the mean over all of them falls short of its square by the variance of the
    mean itself.
    """
    mean, squares, count = torch.zeros(()), 0.0, len(host.loader.dataset)
    trained = [p for p in host.model.parameters() if p.requires_grad]
    for i in range(count):
        forward_backward(host, host.objective.collate([host.loader.dataset[i]]))
        gradient = torch.cat([p.grad.flatten() for p in trained if p.grad is not None])
        mean = mean + gradient / count
        squares += float(gradient @ gradient)
        host.optimizers[0].zero_grad()
    norm_squared = float(mean @ mean)
    variance = (squares - count * norm_squared) / (count - 1)
    return variance, norm_squared - variance / count


def mean_of(shown: list[NoiseEstimate]) -> tuple[float, float]:
    """What was measured, on average: variance and squared norm."""
    return sum(n.variance for n in shown) / len(shown), sum(n.norm_squared for n in shown) / len(shown)
