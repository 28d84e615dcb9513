"""How long does a step take whose samples are shared out among ranks, over one in which no rank waits for another?

    pip install -e .[bench]
    python benchmarks/equal_work.py                  # about half an hour on 2 cores
    python benchmarks/equal_work.py --part real      # the other half of the result file stays

*Real*: ``full_finetune_distributed`` on two ranks, each on a core of its own, with one thread. Recipes in the same
processes take turns step by step: in one, each rank computes the samples that it has drawn; in others, a rule says who
computes what, and the same machinery moves samples as for ours; all lay them end to end. With ``group_by_length``,
steps have other samples, and all of an epoch count, where otherwise those that warm up are left out. Data are the
quickstart's and a long-tailed set: log-normal lengths, median 100 tokens, at most 512. Seconds are those of the first
rank, which waits for the other; processor seconds those of the rank that has used most in each step, which is how long
it would take if no other program ran. Every rank runs one forward in a step, with as many tokens as there are, so that
no way learns another size. The optimizer is SGD, as Adam makes rounding as large as its steps.

*Simulated*: each rank draws samples of log-normal lengths (median 200 tokens, mean 296, at most 2,048, which half a
percent have), and a step takes as long as its slowest rank. Samples of ``s`` tokens cost ``s + s**2 / (6 *
hidden_size)``. *Ideal* is the mean over ranks, with samples end to end. Where a single sample costs more than that, no
rule reaches it: *least possible*. Every rule has the same draws.

- ``group_by_length`` and ``batch_rebalance`` are Trainer's, run by its own samplers. The first sorts the samples of 50
  batches, whichever ranks get these. The second cuts the sorted samples of a step into runs of about the same padded
  cost, of which it takes attention for ``0.001 * s**2``, whatever the model.
- verl's is written from its description: as many samples on each rank, by the largest differencing method of Karmarkar
  and Karp, at a cost of ``24576 * s + s**2``, which is that of a hidden size of 4,096.

Where ranks wait for each other in every forward, as those of a sharded model do, the time of a step is the sum over its
forwards of the slowest rank's, and what ranks run at the same time should be alike, too. A second table has these.

The last line printed is a JSON object: seconds without balancing, and by the other rules, over ours, and over processor
seconds; the share of a step that sharing takes; the largest relative difference of losses; time over ideal, end to end;
and the share of samples that move, of real ones on two ranks and of simulated ones on 8.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import commit, write_report
from overhead import ONE_HEAP, WARM_UP_STEPS
from torch.utils.data import Dataset

from adaptive_batching._step.share import SampleCost, Share, StepTime, share_out
from adaptive_batching._step.split import SplitRule, split_samples

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "equal_work_cpu.md"
MEDIAN, SIGMA, LONGEST = 200, 0.9, 2048
SAMPLES = 8  # that a rank draws for a step
IN_TURNS_SAMPLES, IN_TURNS_STEPS, LIMITS = 32, 50, (2048, 4096, 8192)
TIMED_RANKS, TIMED_SAMPLES = 512, 32
VERL_COST = SampleCost(0.0, 24576.0, 1.0)

Draw = list[list[int]]  # for each rank, the lengths of the samples that it draws for a step


@dataclass(frozen=True)
class Step:
    """The work of each rank in a step, and the share of samples that were moved to another rank."""

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


def unbalanced(draws: list[Draw], cost: SampleCost, pads: bool) -> Iterator[Step]:
    for lengths in draws:
        yield Step([[own] for own in lengths], 0.0)


def group_by_length(draws: list[Draw], cost: SampleCost, pads: bool) -> Iterator[Step]:
    """Trainer hands the sampler's batches to its ranks in turn."""
    num_ranks, lengths = len(draws[0]), [*chain(*chain(*draws))]
    batches = [[lengths[index] for index in batch] for batch in grouped(lengths)]
    for start in range(0, len(batches), num_ranks):
        yield Step([[batch] for batch in batches[start : start + num_ranks]])


def grouped(lengths: Sequence[int]) -> list[list[int]]:
    """Return batches of indices, as Trainer's sampler makes them."""
    from transformers.trainer_pt_utils import LengthGroupedSampler

    order = [*LengthGroupedSampler(SAMPLES, lengths=[*lengths], generator=torch.Generator().manual_seed(0))]
    return [order[start : start + SAMPLES] for start in range(0, len(order), SAMPLES)]


def sets_of_batch_rebalance(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Return the indices of the samples that each rank gets; in Trainer, every rank plans all, and takes its own."""
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    sampler = BatchRebalanceSampler(lengths, effective_batch_size=len(lengths), dp_size=num_ranks, grad_accum=1)
    planned = sampler._assign(range(len(lengths)), lengths)  # what its iterator yields to one rank, for all
    return [[*chain(*batches)] for batches in planned]


def sets_of_verl(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    return by_differences([VERL_COST.of_sample(length) for length in lengths], num_ranks)


Sets = Callable[[Sequence[int], int], list[list[int]]]


def of_sets(draws: list[Draw], sets: Sets) -> Iterator[Step]:
    for lengths in draws:
        tokens = [*chain(*lengths)]
        yield Step([[[tokens[index] for index in own]] for own in sets(tokens, len(lengths))])


def batch_rebalance(draws: list[Draw], cost: SampleCost, pads: bool) -> Iterator[Step]:
    return of_sets(draws, sets_of_batch_rebalance)


def verl(draws: list[Draw], cost: SampleCost, pads: bool) -> Iterator[Step]:
    return of_sets(draws, sets_of_verl)


def ours(draws: list[Draw], cost: SampleCost, pads: bool) -> Iterator[Step]:
    if pads:  # more forwards make less padding, and must cost something to be few
        cost = SampleCost(SampleCost().fixed, cost.per_token, cost.per_token_squared)
    for lengths in draws:
        share = share_out(lengths, cost, pads=pads)
        parts = [[[lengths[home][index] for home, index in part] for part in turns] for turns in share.parts]
        yield Step(parts, share.num_moved / sum(map(len, lengths)))


RULES: dict[str, Rule] = {
    "unbalanced": unbalanced,
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
    splits = [split_samples(own, SplitRule(by_length=True), limit, pads=False) for own in lengths]
    parts = [[[own[index] for index in part] for part in each] for own, each in zip(lengths, splits, strict=True)]
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


class LongTailed(Dataset[dict[str, Any]]):
    """Random tokens of log-normal lengths."""

    def __init__(self, tokenizer: Any, samples: int, **ignored: Any) -> None:
        generator = random.Random(0)
        draws = [generator.lognormvariate(math.log(100), 1.0) for _ in range(samples)]
        self._samples = [[generator.randrange(1, 4000) for _ in range(min(max(round(each), 8), 512))] for each in draws]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = self._samples[index]
        return {"tokens": tokens, "labels": [-100, *tokens[1:]], "mask": [False] * len(tokens)}


DATA: dict[str, dict[str, Any]] = {
    "quickstart": {},
    "long-tailed": {"_component_": "equal_work.LongTailed"},
}
DRAWN, GROUPED, OURS = "unbalanced", "`group_by_length`", "ours"
SETS: dict[str, Sets] = {"`batch_rebalance`": sets_of_batch_rebalance, "verl": sets_of_verl}
WAYS = [DRAWN, GROUPED, *SETS, OURS]
"""Of real ranks to divide the samples of a step."""


def share_of_way(lengths: Draw, *arguments: Any, **named: Any) -> Share:
    """Share out a step by the rule of the recipe that this thread trains."""
    way = threading.current_thread().name
    if way not in SETS:
        return share_out(lengths, *arguments, **named)
    drawn = [(home, index) for home, own in enumerate(lengths) for index in range(len(own))]
    sets = SETS[way]([lengths[home][index] for home, index in drawn], len(lengths))
    unknown = StepTime(1.0, 1.0)
    return Share([[[drawn[index] for index in own]] for own in sets], unknown, unknown)


def measure(inputs: str, directory: str, data: str, num_steps: int, first: int) -> None:
    """Train in all ways in turns, on this rank; the first one writes what all have measured."""
    sys.path.insert(0, str(ROOT))
    from omegaconf import OmegaConf
    from overhead import TakingTurns, run_all

    from adaptive_batching._step import row_size, sharing
    from adaptive_batching.torchtune import load_stock
    from recipes import full_finetune_distributed as recipes

    cores = sorted(os.sched_getaffinity(0))
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    stock: Any = load_stock("full_finetune_distributed")
    turns = TakingTurns(first, len(WAYS))
    processor: list[list[float]] = [[] for _ in WAYS]
    took: dict[str, list[tuple[float, int]]] = {way: [] for way in WAYS}
    used = [time.process_time()]
    parts_of = sharing.Sharing.parts

    def timed(self: sharing.Sharing, *arguments: Any, **named: Any) -> Any:
        start = time.perf_counter()
        parts = parts_of(self, *arguments, **named)
        moved = 0 if self.last is None else self.last.num_moved
        took[threading.current_thread().name].append((time.perf_counter() - start, moved))
        return parts

    sharing.Sharing.parts = timed  # type: ignore[method-assign]
    sharing.share_out = share_of_way  # type: ignore[attr-defined, assignment]
    row_size._ON_CPU = 2**20

    def make(way: str) -> Any:
        cfg: Any = OmegaConf.load(ROOT / "recipes/configs/quickstart/full_single_device.yaml")
        cfg.update(
            data_dir=inputs, output_dir=f"{directory}/{WAYS.index(way)}", batch_size=SAMPLES, epochs=1,
            micro_batch_size="auto", use_maximum_batch_size=False, batch_increase_function=None,
            adaptive_batching={"balance_ranks": way not in (DRAWN, GROUPED), "memory_limit": "4GiB"},
        )  # fmt: skip
        cfg.tokenizer.max_seq_len = 512
        cfg.optimizer = {"_component_": "torch.optim.SGD", "lr": 0.1}
        number = num_ranks * SAMPLES * num_steps
        cfg.dataset.update(split=f"train[:{number}]")
        if DATA[data]:
            cfg.dataset = {**DATA[data], "samples": number, "packed": False}
        made: Any = recipes.FullFinetuneRecipeDistributed(cfg=cfg)
        made.setup(cfg)
        stock.init_process_group = lambda backend: None  # the next recipe joins the same
        made.save_checkpoint = lambda epoch: None
        if way == GROUPED:
            dataset = made._dataloader.dataset
            batches = grouped([len(dataset[index]["tokens"]) for index in range(len(dataset))])
            made._dataloader._batches.sampler = [*chain(*batches[rank::num_ranks])]
        return made

    threads = []
    for number, way in enumerate(WAYS):
        recipe = make(way)
        turn = turns.watcher(number)
        step_done = turn.step

        def note(*arguments: Any, number: int = number, step_done: Any = step_done, **named: Any) -> None:
            now = time.process_time()
            processor[number].append(now - used[0])
            step_done(*arguments, **named)
            used[0] = time.process_time()

        turn.step = note
        recipe.watchers.append(turn)
        threads.append(threading.Thread(target=turns.train, args=(number, recipe), name=way))
    used[0] = time.process_time()
    run_all(threads)
    of_ranks = recipe.ranks.gather({"seconds": turns.seconds, "processor": processor, "took": took})
    if recipe.ranks.is_first:
        Path(directory, "found.json").write_text(json.dumps({"losses": turns.losses, "ranks": of_ranks}))
    recipe.ranks.leave()
    recipe.cleanup()


@dataclass(frozen=True)
class Half:
    """The results of one half of the benchmark, real or simulated."""

    facts: list[str]
    rows: list[str]
    figures: dict[str, Any]


def real(num_ranks: Sequence[int], num_steps: int, repeats: int) -> Half:
    """Measure on real ranks, each on a core of its own as far as there are so many."""
    from adaptive_batching._torchtune.cli.quickstart import build

    load, rows, figures = os.getloadavg()[0], list[str](), dict[str, Any]()
    differences, moved, overheads = [0.0], list[float](), list[float]()
    with tempfile.TemporaryDirectory() as directory:
        build(Path(directory, "inputs"))
        for ranks in num_ranks:
            for data in DATA:
                found = [
                    measure_ranks(directory, data, ranks, num_steps, repeat % len(WAYS)) for repeat in range(repeats)
                ]
                differences += [difference_of_losses(each["losses"]) for each in found]
                times = [of_way(found, way, data, ranks) for way in WAYS]
                rows += [each.row(times[-1]) for each in times]
                print(*rows[-len(WAYS) :], sep="\n", flush=True)
                ours = times[-1]
                if data == "long-tailed":
                    figures[f"real_speedup_{ranks}"] = round(ours.faster_than(times[0])[0], 4)
                    figures[f"real_processor_speedup_{ranks}"] = round(ours.faster_than(times[0], "processor")[0], 4)
                    for peer in times[1:-1]:
                        name = peer.way.strip("`")
                        figures[f"real_faster_than_{name}_{ranks}"] = round(ours.faster_than(peer)[0], 4)
                if ranks == num_ranks[0]:
                    moved.append(ours.moved)
                    overheads.append(ours.sharing)
    figures |= {
        "loss_difference": float(f"{max(differences):.2g}"), "moved": round(max(moved), 4),
        "sharing_share_of_step": round(max(overheads), 4),
    }  # fmt: skip
    cores = len(os.sched_getaffinity(0))
    facts = [
        f"{repeats} times {num_steps - WARM_UP_STEPS} steps of {SAMPLES} samples on each rank; means, ratios of sums, "
        "and in brackets 95 % of them",
        f"{cores} cores, with a load of {load:.1f} in the minute before; where there are more ranks, several share a "
        "core, and the threads of a rank that communicate always share its own",
        "sharing: median of what a step takes to gather lengths, assign, and exchange samples, a wait for the other "
        "rank included, and as a share of the step",
        f"the largest relative difference of the losses is {figures['loss_difference']:.1g}",
    ]
    head = "| ranks | data | rule | seconds | ours is faster | by processor seconds | sharing | moved |"
    return Half(facts, [head, "|" + 8 * "---|", *rows], figures)


@dataclass(frozen=True)
class Times:
    """Times of steps on real ranks, by one rule."""

    way: str
    data: str
    ranks: int
    seconds: np.ndarray[Any, Any]
    """Of the first rank in each step, warm-up included, [launch, step]."""

    processor: np.ndarray[Any, Any]
    """Of the rank that uses most in each step, [launch, step]."""

    took: float
    """Median of the seconds in which a step is shared out."""

    moved: float
    """Share of the samples of a step that are computed elsewhere."""

    @property
    def sharing(self) -> float:
        return self.took / float(np.median(self.seconds[:, WARM_UP_STEPS:]))

    def faster_than(self, other: Times, of: str = "seconds") -> tuple[float, float, float]:
        """Return the time of another way over that of this one, and its 95 % confidence interval."""
        own, others = getattr(self, of), getattr(other, of)
        if GROUPED in (self.way, other.way):  # whose steps have other samples
            return ratio_and_interval(others.ravel(), own.ravel(), are_pairs=False)
        return ratio_and_interval(others[:, WARM_UP_STEPS:].ravel(), own[:, WARM_UP_STEPS:].ravel())

    def row(self, ours: Times) -> str:
        """Return its row of the table."""
        ratios = [ours.faster_than(self, of) for of in ("seconds", "processor")] if self.way != OURS else []
        cells = [f"{ratio:.3f} ({low:.3f} to {high:.3f})" for ratio, low, high in ratios] or ["", ""]
        if self.took:
            cells += [f"{1000 * self.took:.1f} ms ({self.sharing:.1%})", f"{self.moved:.0%}"]
        start = 0 if self.way == GROUPED else WARM_UP_STEPS
        seconds = self.seconds[:, start:].mean()
        return f"| {self.ranks} | {self.data} | {self.way} | {seconds:.3f} | {' | '.join([*cells, '', ''][:4])} |"


def of_way(found: Sequence[dict[str, Any]], way: str, data: str, ranks: int) -> Times:
    """Return what launches have found about a way."""
    number = WAYS.index(way)

    def of_ranks(key: str) -> np.ndarray[Any, Any]:
        return np.array([[rank[key][number] for rank in each["ranks"]] for each in found])  # [launch, rank, step]

    steps = [step for each in found for step in each["ranks"][0]["took"][way][WARM_UP_STEPS:]]
    return Times(
        way, data, ranks, of_ranks("seconds")[:, 0], of_ranks("processor").max(axis=1),
        statistics.median(seconds for seconds, _ in steps) if steps else 0.0,
        statistics.mean(moved for _, moved in steps) / (ranks * SAMPLES) if steps else 0.0,
    )  # fmt: skip


def difference_of_losses(losses: Sequence[Sequence[float]]) -> float:
    """Return the largest relative difference from the unbalanced ones, of ways whose steps have the same samples."""
    drawn = np.array(losses[WAYS.index(DRAWN)])
    others = [np.array(losses[number]) for number, way in enumerate(WAYS) if way != GROUPED]
    return max(float(np.max(np.abs(each / drawn - 1))) for each in others)


def measure_ranks(directory: str, data: str, num_ranks: int, num_steps: int, first: int) -> dict[str, Any]:
    """Launch the ranks, and return what they have measured."""
    with tempfile.TemporaryDirectory(dir=directory) as out:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks)]
        options = ["--real-steps", str(num_steps), "--measure", f"{directory}/inputs", out, data, str(first)]
        environment = {"OMP_NUM_THREADS": "1", **ONE_HEAP, "HF_DATASETS_CACHE": f"{directory}/cache"}
        env = {**os.environ, **environment}
        done = subprocess.run([*launch, __file__, *options], env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr[-4000:])
        found: dict[str, Any] = json.loads(Path(out, "found.json").read_text())
        return found


def ratio_and_interval(
    ones: np.ndarray[Any, Any], others: np.ndarray[Any, Any], *, are_pairs: bool = True
) -> tuple[float, float, float]:
    """Return the ratio of the sums, and its 95 % confidence interval, by bootstrapping steps, or pairs of them."""
    generator = np.random.default_rng(0)
    drawn = generator.integers(len(ones), size=(2000, len(ones)))
    of_others = drawn if are_pairs else generator.integers(len(others), size=drawn.shape)
    low, high = np.quantile(ones[drawn].sum(1) / others[of_others].sum(1), [0.025, 0.975])
    return float(ones.sum() / others.sum()), float(low), float(high)


def simulated(num_ranks: Sequence[int], num_steps: int, hidden_size: int) -> Half:
    """Simulate every rule."""
    cost = SampleCost(0.0, 1.0, SampleCost.of_model(hidden_size).per_token_squared)
    rows, figures = list[str](), dict[str, Any]()
    for ranks in num_ranks:
        found, over_ideal, moved = simulate(ranks, num_steps, cost)
        rows += found
        figures[f"time_over_ideal_{ranks}"] = round(over_ideal["ours"], 4)
        figures[f"verl_over_ideal_{ranks}"] = round(over_ideal["verl"], 4)
        figures[f"batch_rebalance_over_ideal_{ranks}"] = round(over_ideal["`batch_rebalance`"], 4)
        figures.setdefault("moved_simulated", round(moved, 4))
    facts = [
        f"{num_steps} simulated steps of {SAMPLES} samples on each rank, hidden size {hidden_size:,}; time over ideal, "
        "and tokens of the largest forward pass of all steps, of which each rank runs one",
        "ideal is without padding, also where samples are padded; ours is then balanced for padded forward passes, and "
        "all others are as they are",
        f"second table: {IN_TURNS_STEPS} steps of {IN_TURNS_SAMPLES} samples on each rank, in forward passes of at "
        "most so many tokens, for which ranks wait for each other; time over ideal, and in brackets the most "
        "forward passes",
        f"{TIMED_RANKS} ranks with {TIMED_SAMPLES} samples each are balanced in {1000 * seconds_to_share(cost):.0f} ms",
    ]
    rows = [
        "| ranks | rule | end to end | largest | padded | largest | moved |",
        "|---|---|---|---|---|---|---|",
        *rows,
        "",
        "| ranks | tokens | unbalanced | equal sums, split on each rank | in turns | moved |",
        "|---|---|---|---|---|---|",
        *(in_turns(ranks, limit, cost) for ranks in num_ranks if ranks <= 64 for limit in LIMITS),
    ]
    return Half(facts, rows, figures)


def main() -> None:
    """Measure, simulate, or both, and write the result file; a half that is not asked for stays as it is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["real", "simulated"], help="default: both")
    parser.add_argument("--real-ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--real-steps", type=int, default=45)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--output", type=Path, default=RESULT, help="default: benchmarks/results/equal_work_cpu.md")
    parser.add_argument("--measure", nargs=4, metavar=("INPUTS", "DIRECTORY", "DATA", "FIRST"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        inputs, directory, data, first = args.measure
        measure(inputs, directory, data, args.real_steps, int(first))
        return
    halves: dict[str, Callable[[], Half]] = {
        "Real": lambda: real(args.real_ranks, args.real_steps, args.repeats),
        "Simulated": lambda: simulated(args.ranks, args.steps, args.hidden_size),
    }
    before = args.output.read_text() if args.part and args.output.exists() else ""
    rows, figures = list[str](), json.loads(before.splitlines()[-1]) if before else {}
    for name, run in halves.items():
        if args.part in (None, name.lower()):
            half = run()
            rows += [f"## {name}", "", f"- at commit {commit()}", *(f"- {fact}" for fact in half.facts), "", *half.rows]
            figures |= half.figures
        elif f"## {name}\n" in before:
            kept = before.split(f"## {name}\n")[1].split("\n## ")[0].split("\n    {")[0]
            rows += [f"## {name}", *kept.rstrip().splitlines()]
        rows.append("")
    write_report(
        "Equal work for every rank", device="cpu", facts=[], rows=rows[:-1], figures=figures, output=args.output,
        packages=("torch", "torchtune", "transformers"),
    )  # fmt: skip


if __name__ == "__main__":
    main()
