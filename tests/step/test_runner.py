"""How a step runs, fails and runs again, whatever its host computes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._probe.does_not_fit import DoesNotFitError
from adaptive_batching._probe.find import find_largest
from adaptive_batching._probe.sizing import ProbeRequest
from adaptive_batching._step.data_parallel import DataParallel
from adaptive_batching._step.limits import TokenLimit
from adaptive_batching._step.runner import StepRunner
from adaptive_batching._step.split import split_by_length
from adaptive_batching._step.work import Part
from tests.support.counting_device import GIB, KIB, MIB, Device, Layer
from tests.support.toy_work import ToyWork


class OtherRanks:
    """Two ranks, and how often this one waited for the other."""

    size, rank, waited = 2, 0, 0

    def largest(self, value: float) -> float:
        self.waited += 1
        return value


class NoCollectives:
    """A sharded model that communicates nothing."""

    def start(self) -> None: ...

    def finish(self) -> None: ...


class StartsOver(ToyWork):
    """A computation in whose runs an allocator starts over, or not, as they say."""

    def __init__(self, retried: Sequence[bool]) -> None:
        super().__init__()
        self.counts = iter([count for again in retried for count in (0, int(again))])

    def num_retries(self) -> int:
        return next(self.counts)


def run_steps(runner: StepRunner[list[int], Any, Any], number: int) -> None:
    for _ in range(number):
        runner.step([8, 8])


@pytest.mark.parametrize("collectives", [None, NoCollectives()])
def test_ranks_that_cannot_tell_each_other_do_not_shrink_alone(collectives: Any) -> None:
    """A rank whose allocator starts over would wait for the others, which do not know."""
    ranks: Any = OtherRanks()
    work = StartsOver([True] * 4)
    work.may_differ = lambda parts: False  # type: ignore[method-assign]
    parallel = DataParallel(ranks, work.parameters, [nn.Linear(1, 1)], collectives=collectives)
    run_steps(StepRunner(work, parallel), 4)
    assert (ranks.waited > 0, work.limit.max_tokens is not None) == ((collectives is not None,) * 2)


def test_only_what_goes_on_shrinks_parts_and_by_as_little_as_helps() -> None:
    runner = StepRunner(StartsOver([True, True, False, True, True, True]))
    limit = runner.limit
    run_steps(runner, 5)
    assert limit.max_tokens is None
    run_steps(runner, 1)
    assert limit.max_tokens == 14, "an eighth less than 16"


def test_a_step_in_one_of_whose_parts_memory_ran_out_is_no_clean_one() -> None:
    """A rollout of PPO runs in parts that can each run again by itself."""
    limit, fails = TokenLimit(steps_to_recover=1), iter([True])

    def run(samples: Sequence[int]) -> None:
        if next(fails, False):
            raise torch.OutOfMemoryError()

    work = ToyWork(run)
    work.limit = limit
    runner = StepRunner(work)
    for rises in (False, True):
        for _ in range(2):
            runner.run([8, 8])
        runner.end_step()
        assert limit.max_tokens == (16 if rises else 8), "half of 16, until a clean step doubles it"


def test_a_step_that_ran_again_as_it_was_is_no_clean_one() -> None:
    """Else a limit would double after steps each of which had run out of memory first."""
    fails = iter([True, False] * 20)

    def run(samples: Sequence[int]) -> None:
        if next(fails):
            raise torch.OutOfMemoryError()

    work = ToyWork(run)
    work.limit = TokenLimit(steps_to_recover=2)
    work.limit.shrink(32)
    runner = StepRunner(work, largest_that_ran=16)
    run_steps(runner, 2)
    assert runner.num_recoveries == 3 and work.limit.max_tokens == 16


def test_a_run_that_recovers_in_every_step_warns_with_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    """As where another program takes more and more of the device."""
    fits, recoveries = 8, []

    def run(samples: Sequence[int]) -> None:
        if len(samples) > fits:
            raise torch.OutOfMemoryError()

    runner = StepRunner(ToyWork(run))
    for _ in range(3):
        runner.step([8] * 16)
        recoveries.append(runner.num_recoveries)
        fits //= 2
    # First half; then what has fitted before runs as it was, with an eighth less, and with half of that; then so again,
    # but that an eighth less is enough.
    assert recoveries == [1, 4, 6]
    assert caplog.text.count("which makes training slow. ") == caplog.text.count(", or train less") == 1


class OnDevice(ToyWork):
    """Samples of these lengths on a model of a device, split by length."""

    def __init__(self, device: Device, max_tokens: int) -> None:
        super().__init__(discard=device.release)
        self._device, self.limit.bound = device, max_tokens
        self.num_retries = device.num_retries  # type: ignore[method-assign]

    def split(self, samples: list[int]) -> Iterator[list[Part]]:
        most = self.limit.max_tokens
        assert most is not None
        parts = [[samples[index] for index in part] for part in split_by_length(samples, most, 512)]
        yield [Part(part, self.tokens(part)) for part in parts]

    def runs(self, parts: Sequence[Part]) -> list[Callable[[], None]]:
        return [partial(self._device.forward_backward, part.tokens) for part in parts]


@pytest.mark.parametrize("seed", range(6))
def test_training_on_what_was_probed_needs_hardly_any_recovery_and_on_less_memory_few(seed: int) -> None:
    chance = random.Random(seed)
    weights, room = chance.randint(8 * MIB, 64 * MIB), chance.randint(1 * GIB, 12 * GIB)
    kept, passing, lost = chance.randint(2, 64), chance.randint(0, 64), chance.uniform(0, 0.4)
    layers = [Layer(weights, kept * KIB, passing * KIB)] * 6
    device = Device(4 * 6 * weights + room, layers, libraries_bytes=24 * MIB)
    step = device.training_step()
    config = AdaptiveBatchingConfig.from_mapping({"search": "binary_search"})
    try:
        found = find_largest(step, config, device, ProbeRequest(64, rounds=False))
    except DoesNotFitError:
        return
    runner = StepRunner(OnDevice(device, device.length * found.batch_size))
    limit = runner.limit

    def train(steps: int) -> None:
        for _ in range(steps):
            runner.step([chance.randint(8, device.length) for _ in range(48)])

    with device.limit(found.budget_bytes):
        train(60)
        # Other lengths than those probed can leave so much unused in between that it has to start from an empty cache.
        assert limit.num_recoveries <= 1
        assert limit.max_tokens is None or limit.max_tokens > 0.35 * found.batch_size * device.length

        device.release()
        needed = device.allocator.allocated + sum(layer.kept_per_token for layer in layers) * device.length * 4 + GIB
        device.allocator.limit = max(int(device.allocator.limit * (1 - lost)), needed)  # a neighbour moves in
        train(200)
        assert limit.num_recoveries <= 6, "once or twice for each time that it is raised"
        train(200)
        assert limit.num_recoveries <= 8, "and less and less"
