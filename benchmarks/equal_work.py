"""How long does a step take whose samples are shared out among ranks, over one in which no rank waits for another?

    pip install -e .[bench]
    python benchmarks/equal_work.py                  # about 4 minutes on 2 cores

Steps are simulated: each rank draws samples of log-normal lengths (median 200 tokens, mean 296, at most 2,048, which
half a percent have), and a step takes as long as its slowest rank. Samples of ``s`` tokens cost ``s + s**2 / (6 *
hidden_size)``. *Ideal* is the mean over ranks, with samples end to end. Where a single sample costs more than that, no
rule reaches it: *least possible*. Every rule has the same draws.

- ``group_by_length`` and ``batch_rebalance`` are Trainer's, run by its own samplers. The first sorts the samples of 50
  batches, whichever ranks get these. The second cuts the sorted samples of a step into runs of about the same padded
  cost, of which it takes attention for ``0.001 * s**2``, whatever the model.
- verl's is written from its description: as many samples on each rank, by the largest differencing method of Karmarkar
  and Karp, at a cost of ``24576 * s + s**2``, which is that of a hidden size of 4,096.

Where ranks wait for each other in every forward, as those of a sharded model do, the time of a step is the sum over its
forwards of the slowest rank's, and what ranks run at the same time should be alike, too. A second table has these.

The last line printed is a JSON object: time over ideal, end to end, and the share of samples that move on 8 ranks.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from common import write_report

from adaptive_batching._step.share import SampleCost, share_out
from adaptive_batching._step.split import SplitRule, split_samples

MEDIAN, SIGMA, LONGEST = 200, 0.9, 2048
SAMPLES = 8  # that a rank draws for a step
IN_TURNS_SAMPLES, IN_TURNS_STEPS, LIMITS = 32, 50, (2048, 4096, 8192)
TIMED_RANKS, TIMED_SAMPLES = 512, 32
VERL_COST = SampleCost(0.0, 24576.0, 1.0)

Draw = list[list[int]]  # for each rank, the lengths of the samples that it draws for a step


@dataclass(frozen=True)
class Step:
    """What ranks compute in a step, and the share of it that others have drawn."""

    parts: Sequence[Sequence[Sequence[int]]]
    """Of each rank, by forward, the lengths of samples."""

    moved: float | None = None
    """None for a rule that hands samples out itself, so that no rank has drawn any."""

    def time(self, cost: SampleCost, *, pads: bool) -> float:
        """Return the time of its forwards, in each of which the slowest rank counts."""
        turns = zip(*self.parts, strict=True)
        return sum(max(cost.of_part(part, pads=pads) for part in parts) for parts in turns)

    def largest(self, *, pads: bool) -> int:
        """Return the tokens of its largest forward."""
        parts = [part for part in chain(*self.parts) if part]
        return max(len(part) * max(part) if pads else sum(part) for part in parts)


Rule = Callable[[list[Draw], SampleCost, bool], Iterator[Step]]


def draw(generator: random.Random, num_ranks: int, num_samples: int) -> Draw:
    return [
        [min(math.ceil(generator.lognormvariate(math.log(MEDIAN), SIGMA)), LONGEST) for _ in range(num_samples)]
        for _ in range(num_ranks)
    ]


def as_drawn(draws: list[Draw], cost: SampleCost, pads: bool) -> Iterator[Step]:
    for lengths in draws:
        yield Step([[own] for own in lengths], 0.0)


def group_by_length(draws: list[Draw], cost: SampleCost, pads: bool) -> Iterator[Step]:
    """Trainer hands the sampler's batches to its ranks in turn."""
    from transformers.trainer_pt_utils import LengthGroupedSampler

    num_ranks, lengths = len(draws[0]), [*chain(*chain(*draws))]
    order = [*LengthGroupedSampler(SAMPLES, lengths=lengths, generator=torch.Generator().manual_seed(0))]
    batches = [[lengths[index] for index in order[start : start + SAMPLES]] for start in range(0, len(order), SAMPLES)]
    for start in range(0, len(batches), num_ranks):
        yield Step([[batch] for batch in batches[start : start + num_ranks]])


def batch_rebalance(draws: list[Draw], cost: SampleCost, pads: bool) -> Iterator[Step]:
    """Plan each step once, where Trainer has every rank plan it and take its own part."""
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    for lengths in draws:
        tokens = [*chain(*lengths)]
        sampler = BatchRebalanceSampler(tokens, effective_batch_size=len(tokens), dp_size=len(lengths), grad_accum=1)
        planned = sampler._assign(range(len(tokens)), tokens)  # what its iterator yields to one rank, for all
        yield Step([[[tokens[index] for index in batch] for batch in batches] for batches in planned])


def verl(draws: list[Draw], cost: SampleCost, pads: bool) -> Iterator[Step]:
    for lengths in draws:
        tokens = [*chain(*lengths)]
        sets = by_differences([VERL_COST.of_sample(length) for length in tokens], len(lengths))
        yield Step([[[tokens[index] for index in own]] for own in sets])


def ours(draws: list[Draw], cost: SampleCost, pads: bool) -> Iterator[Step]:
    if pads:  # more forwards make less padding, and must cost something to be few
        cost = SampleCost(SampleCost().fixed, cost.per_token, cost.per_token_squared)
    for lengths in draws:
        share = share_out(lengths, cost, pads=pads)
        parts = [[[lengths[home][index] for home, index in part] for part in turns] for turns in share.parts]
        yield Step(parts, share.num_moved / sum(map(len, lengths)))


RULES: dict[str, Rule] = {
    "as drawn": as_drawn,
    "`group_by_length`": group_by_length,
    "`batch_rebalance`": batch_rebalance,
    "verl": verl,
    "ours": ours,
}


def by_differences(works: Sequence[float], num_sets: int) -> list[list[int]]:
    """Divide a multiple of ``num_sets`` items into sets of as many items, by the largest differencing method.

    Sorted items make groups of one item for each set. The two groups with the largest differences between their sets
    become one, in which the largest set of one has joined the smallest of the other, until one group is left.
    """
    order = sorted(range(len(works)), key=lambda index: works[index])
    groups: list[tuple[float, int, list[tuple[float, list[int]]]]] = []

    def add(sets: list[tuple[float, list[int]]], number: int) -> None:
        sets.sort(key=lambda each: -each[0])
        heapq.heappush(groups, (sets[-1][0] - sets[0][0], number, sets))

    for start in range(0, len(order), num_sets):
        add([(works[index], [index]) for index in order[start : start + num_sets]], start)
    while len(groups) > 1:
        (_, number, sets), (_, _, others) = heapq.heappop(groups), heapq.heappop(groups)
        pairs = zip(sets, reversed(others), strict=True)
        add([(work + other, [*items, *more]) for (work, items), (other, more) in pairs], number)
    return [items for _, items in groups[0][2]]


def simulate(num_ranks: int, num_steps: int, cost: SampleCost) -> tuple[list[str], dict[str, float], float]:
    """Return rows of a table, each rule's time over ideal end to end, and the share of samples that ours moves."""
    generator = random.Random(num_ranks)
    draws = [draw(generator, num_ranks, SAMPLES) for _ in range(num_steps)]
    ideal = [statistics.mean(cost.of_part(own) for own in lengths) for lengths in draws]
    longest = [cost.of_part([max(chain(*lengths))]) for lengths in draws]
    least = statistics.mean(max(mean, most) / mean for mean, most in zip(ideal, longest, strict=True))
    rows, over_ideal, moved = [f"| {num_ranks} | least possible | {least:.3f} | | | | |"], dict[str, float](), 0.0
    for name, rule in RULES.items():
        cells = []
        for pads in (False, True):
            steps = [*rule(draws, cost, pads)]
            # a rule that draws by itself has other samples in a step, and in all steps the same
            ratio = sum(step.time(cost, pads=pads) for step in steps) / sum(ideal)
            cells += [f"{ratio:.3f}", f"{max(step.largest(pads=pads) for step in steps):,}"]
            if not pads:
                over_ideal[name] = ratio
                shares = [step.moved for step in steps if step.moved is not None]
                moved = statistics.mean(shares) if shares else math.nan
        rows.append(f"| {num_ranks} | {name} | {' | '.join(cells)} | {f'{moved:.0%}' if shares else ''} |")
        print(rows[-1], flush=True)
    return rows, over_ideal, moved


def in_turns(num_ranks: int, limit: int, cost: SampleCost) -> str:
    """Return a row of the table of steps in which ranks wait for each other in every forward."""
    generator = random.Random(num_ranks)
    ideal, times, moved, most = 0.0, [0.0] * 3, 0, [0] * 3
    for _ in range(IN_TURNS_STEPS):
        lengths = draw(generator, num_ranks, IN_TURNS_SAMPLES)
        share = share_out(lengths, cost, limit=limit)
        shared = [[[lengths[home][index] for home, index in part] for part in turns] for turns in share.parts]
        sums = [[lengths[home][index] for home, index in turns[0]] for turns in share_out(lengths, cost).parts]
        ways = [split(lengths, limit), split(sums, limit), shared]
        ideal += statistics.mean(cost.of_part(own) for own in lengths)
        moved += share.num_moved
        for way, parts in enumerate(ways):
            times[way] += Step(parts).time(cost, pads=False)
            most[way] = max(most[way], len(parts[0]))
    cells = " | ".join(f"{time / ideal:.3f} ({turns})" for time, turns in zip(times, most, strict=True))
    return f"| {num_ranks} | {limit:,} | {cells} | {moved / IN_TURNS_STEPS / IN_TURNS_SAMPLES / num_ranks:.0%} |"


def split(lengths: Draw, limit: int) -> list[list[list[int]]]:
    """Return what ranks run that split their own samples, with nothing where others run more forwards."""
    rule = SplitRule(max_tokens=limit)
    parts = [[[own[index] for index in part] for part in split_samples(own, rule, pads=False)] for own in lengths]
    most = max(map(len, parts))
    return [own + [[] for _ in range(len(own), most)] for own in parts]


def seconds_to_share(cost: SampleCost) -> float:
    """Return the seconds in which the samples of a large step are shared out: the least of five."""
    lengths = draw(random.Random(0), TIMED_RANKS, TIMED_SAMPLES)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        share_out(lengths, cost)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def main() -> None:
    """Simulate every rule on as many ranks as asked for, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/equal_work_cpu.md")
    args = parser.parse_args()
    cost = SampleCost(0.0, 1.0, SampleCost.of_model(args.hidden_size).per_token_squared)
    rows, figures = list[str](), dict[str, Any]()
    for num_ranks in args.ranks:
        found, over_ideal, moved = simulate(num_ranks, args.steps, cost)
        rows += found
        figures[f"time_over_ideal_{num_ranks}"] = round(over_ideal["ours"], 4)
        figures[f"verl_over_ideal_{num_ranks}"] = round(over_ideal["verl"], 4)
        figures[f"batch_rebalance_over_ideal_{num_ranks}"] = round(over_ideal["`batch_rebalance`"], 4)
        figures.setdefault("moved", round(moved, 4))
    write_report(
        "Equal work for every rank",
        device="cpu",
        facts=[
            f"{args.steps} simulated steps of {SAMPLES} samples on each rank, hidden size {args.hidden_size:,}; time "
            "over ideal, and tokens of the largest forward of all steps, of which each rank runs one",
            "ideal is without padding, also where samples are padded; ours is then shared out for padded forwards, and "
            "all others are as they are",
            f"second table: {IN_TURNS_STEPS} steps of {IN_TURNS_SAMPLES} samples on each rank, in forwards of at most "
            "so many tokens, for which ranks wait for each other; time over ideal, and in brackets the most forwards",
            f"{TIMED_RANKS} ranks with {TIMED_SAMPLES} samples each are shared out in "
            f"{1000 * seconds_to_share(cost):.0f} ms",
        ],
        rows=[
            "| ranks | rule | end to end | largest | padded | largest | moved |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
            "| ranks | tokens | as drawn | equal sums, split on each rank | in turns | moved |",
            "|---|---|---|---|---|---|",
            *(in_turns(num_ranks, limit, cost) for num_ranks in args.ranks if num_ranks <= 64 for limit in LIMITS),
        ],
        figures=figures,
        output=args.output,
        packages=("torch", "transformers"),
    )


if __name__ == "__main__":
    main()
