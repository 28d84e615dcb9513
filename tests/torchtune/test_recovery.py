"""What recovery decides, where the ranks that it would take are not at hand."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._probe.does_not_fit import DoesNotFitError
from adaptive_batching._probe.find import ProbeRequest, find_largest
from adaptive_batching._step.limits import TokenLimit
from adaptive_batching._step.run import Outcome, run_micro_batches
from adaptive_batching._step.split import Capacity
from adaptive_batching._torchtune.stock.host import Host
from adaptive_batching._torchtune.stock.losses import Distillation
from adaptive_batching._torchtune.stock.objective import StockParts
from adaptive_batching._torchtune.train.splitting import MicroBatch, Recovery, SplitPolicy, Splitter, remedy
from adaptive_batching._torchtune.train.training_step import remedies
from adaptive_batching._values import ByLength
from tests.support.caching_allocator import GIB, KIB, MIB, Device, Layer
from tests.support.hosts import ALONE, SAMPLES, host

CUDA = torch.device("cuda")
PARTS = [MicroBatch([{"tokens": [1] * 8, "labels": [1] * 8}] * 2, tokens=16)]


class OtherRanks:
    """Two ranks, and how often this one waited for the other."""

    size, waited = 2, 0

    def largest(self, value: float) -> float:
        self.waited += 1
        return value


def end_steps(recovery: Recovery, *retried: bool) -> None:
    for each in retried:
        recovery.note(PARTS, Outcome([], failed=False, retried=each))
        recovery.end_step()


@pytest.mark.parametrize("collectives", [None, object()])
def test_ranks_that_cannot_tell_each_other_do_not_shrink_alone(collectives: Any) -> None:
    """A rank whose allocator starts over would wait for the others, which do not know."""
    ranks, limit = OtherRanks(), TokenLimit()
    recovery = Recovery(host(ranks=ranks, collectives=collectives, device=CUDA), limit, lambda: None)
    end_steps(recovery, *[True] * 4)
    assert (ranks.waited > 0, limit.max_tokens is not None) == ((collectives is not None,) * 2)


def test_only_what_goes_on_shrinks_micro_batches_and_by_as_little_as_helps() -> None:
    limit = TokenLimit()
    recovery = Recovery(host(device=CUDA), limit, lambda: None)
    end_steps(recovery, True, True, False, True, True)
    assert limit.max_tokens is None
    end_steps(recovery, True)
    assert limit.max_tokens == 14, "an eighth less than 16"


def test_a_step_in_one_of_whose_parts_memory_ran_out_is_no_clean_one() -> None:
    """A rollout of PPO runs in parts that can each run again by itself."""
    limit = TokenLimit(steps_to_recover=1)
    recovery = Recovery(host(), limit, lambda: None)
    ran_out = Outcome[Any]([], failed=True, failed_here=0, error=torch.OutOfMemoryError())
    for raised in (False, True):
        recovery.start()
        if not raised:
            recovery.recover(PARTS, ran_out)
        recovery.note(PARTS, Outcome([], failed=False))
        recovery.start()
        recovery.note(PARTS, Outcome([], failed=False))
        recovery.end_step()
        assert limit.max_tokens == (16 if raised else 8), "half of 16, until a clean step doubles it"


class Run:
    """Training on a model of a GPU's allocator: batches are split, run, and run again in smaller parts."""

    def __init__(self, device: Device, capacity: Capacity) -> None:
        self.device, self.limit = device, TokenLimit()
        self._splitter = Splitter(host(device=device.device), SplitPolicy(ByLength(), capacity, limit=self.limit))
        self._recovery = Recovery(host(device=device.device), self.limit, lambda: None)

    def step(self, lengths: list[int]) -> None:
        batch = [{"tokens": [1] * n, "labels": [1] * n} for n in lengths]

        def attempt(again: bool) -> list[tuple[list[MicroBatch], Outcome[None]]]:
            parts = self._splitter.split(batch)
            forwards = [partial(self.device.forward_backward, each.tokens) for each in parts]
            return [(parts, run_micro_batches(forwards, ALONE, None, self.device.release, self.device.num_retries))]

        self._recovery.start()
        [(parts, _)] = self._recovery.run_until_fits(attempt)
        ran = [len(sample["tokens"]) for part in parts for sample in part.samples]
        assert sorted(ran) == sorted(lengths), "each sample once"
        self._recovery.end_step()


@pytest.mark.parametrize("seed", range(12))
def test_training_on_what_was_probed_needs_hardly_any_recovery_and_on_less_memory_few(seed: int) -> None:
    chance = random.Random(seed)
    weights, room = chance.randint(8 * MIB, 64 * MIB), chance.randint(1 * GIB, 12 * GIB)
    kept, passing, lost = chance.randint(2, 64), chance.randint(0, 64), chance.uniform(0, 0.4)
    layers = [Layer(weights, kept * KIB, passing * KIB)] * 6
    device = Device(4 * 6 * weights + room, layers, libraries_bytes=24 * MIB)
    step = device.training_step()
    config = AdaptiveBatchingConfig.from_mapping({"round_to_power_of_two": False, "search": "binary_search"})
    try:
        found = find_largest(step, config, device, ProbeRequest(64))
    except DoesNotFitError:
        return
    run = Run(device, Capacity(((device.length, found.batch_size),)))

    def train(steps: int) -> None:
        for _ in range(steps):
            run.step([chance.randint(8, device.length) for _ in range(48)])

    with device.limit(found.budget_bytes):
        train(60)
        # Other lengths than those probed can leave so much unused in between that it has to start from an empty cache.
        assert run.limit.num_recoveries <= 1
        assert run.limit.max_tokens is None or run.limit.max_tokens > 0.35 * found.batch_size * device.length

        device.release()
        needed = device.allocator.allocated + sum(layer.kept_per_token for layer in layers) * device.length * 4 + GIB
        device.allocator.limit = max(int(device.allocator.limit * (1 - lost)), needed)  # a neighbour moves in
        train(200)
        assert run.limit.num_recoveries <= 6, "once or twice for each time that it is raised"
        train(200)
        assert run.limit.num_recoveries <= 8, "and less and less"


@pytest.mark.parametrize(
    ("device", "checkpoints", "offloads", "setting"),
    [
        *((device, False, False, "enable_activation_checkpointing=True") for device in ("cpu", "cuda")),
        ("cuda", True, False, "enable_activation_offloading=True"),
        # Elsewhere stock refuses to offload.
        *((device, True, device == "cuda", "a model with quantized weights, as in QLoRA")
          for device in ("cuda", "cpu", "xpu", "mps")),
    ],
)  # fmt: skip
def test_the_remedy_is_one_that_is_not_used_yet(device: str, checkpoints: bool, offloads: bool, setting: str) -> None:
    uses = {"checkpoints_activations": checkpoints, "offloads_activations": offloads}
    found, what_fits = remedy(host(device=torch.device(device), **uses)).split("; ")
    assert found == setting
    assert "'adaptive-batching plan'" in what_fits, "one setting may not be enough"


def remedies_of(host: Host) -> list[str]:
    return [each.setting for each in remedies(host, dict(SAMPLES[0]), lambda groups: [], accumulates=False)]


def test_no_remedy_is_a_key_that_the_recipe_does_not_read() -> None:
    """Distillation does not offload, and PPO has no key for clipping."""
    objective = Distillation(StockParts(None, None, None, 0, frozen=nn.Linear(2, 2), teacher_share=0.5))
    learner = host(objective, device=CUDA, checkpoints_activations=True)
    assert remedy(learner).startswith("a model with quantized weights, as in QLoRA;")
    assert not any("offloading" in each for each in remedies_of(learner))
    assert "optimizer_in_bwd=True" in remedies_of(host())
    assert "optimizer_in_bwd=True (with clip_grad_norm=null)" in remedies_of(host(clip_norm=1.0))
