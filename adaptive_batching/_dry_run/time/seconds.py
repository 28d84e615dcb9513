"""Seconds of a step on a card, by playing what it asks for on three clocks: the host's, the card's and the links'.

Rates are those of data sheets, times a few shares that `CONSTANTS` holds: three were fitted to the throughput that
others published for three runs, two were chosen by the times of PEFT's comparison, two were fitted to two programs on
an H200, and the rest is known of such cards. How far off the answers are is checked against many more runs, by
`benchmarks/dry_run.py` and, where there is a card, `benchmarks/on_a_card.py`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from adaptive_batching._dry_run.cards import Gpu
from adaptive_batching._dry_run.time.step_work import Operation, StepWork

TERA, GIGA, MIB, MICROSECOND = 1e12, 1e9, 2**20, 1e-6
TURNS = 3  # in which a step is played until one begins as the one before has ended
MOST_OF_PEAK = 0.87  # of what is written on a data sheet, at any power
# Where NVIDIA halves the rate of products that are summed in float32, power does not hold them back, and clocks are
# higher than the data sheet's: cuBLAS reaches 0.95 of an L20's 119.5 teraflops (CUDA-Learn-Notes, hgemm).
MOST_OF_HALF_RATE = 1.0
# Teraflops of bfloat16 products that a watt sustains, by the first digit of the compute capability: 268 of an A100's
# 400 watts, 792 of an H100's 700 and 1,745 of a B200's 1,000 (ml-engineering's table of maximum achievable products).
PER_WATT = {8: 0.68, 9: 1.13, 10: 1.75, 12: 1.75}
SHARED_PIPES = 0.75  # of float32's peak where half of its units also do integers: all cards since Ampere's GeForce
NARROW = 8  # rows or columns of a product below which it takes as long as its matrix takes to read
# Tiles that a product is made of, with the share of the peak that each reaches, and parts of its sums.
TILES = (
    (128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 128, 0.8), (64, 64, 0.65),
    (128, 32, 0.7), (32, 128, 0.7),
)  # fmt: skip
PARTS_OF_SUMS, LEAST_OF_SUMS, OF_PARTS = (1, 2, 4, 8, 16), 512, 0.9
IN_MACHINE = 8  # ranks that NVLink or a bus joins; more are joined by the network
LIMITS = {"products": "matrix products", "memory": "memory traffic", "host": "launches on the host",
          "communication": "communication", "transfers": "copies to and from the host"}  # fmt: skip
"""What can limit a step, with the words for it."""

_LIMIT_OF = {"product": "products", "attention": "products", "convolution": "products", "kernel": "memory"}


@dataclass(frozen=True)
class Constants:
    """What the model takes to be the same on every card."""

    product: float = 0.90
    """Of the products that a card's power sustains. Fitted, as are `bandwidth` and `attention`."""

    bandwidth: float = 0.85
    in_flight: float = 22.7 * GIGA
    """Bytes a second that a processor keeps up in PyTorch's kernels. With 132 of them an H200 copies at 4.2 terabytes a
    second, but trains at 3: of many kernels each thread asks for few bytes at once. Fitted to a Llama of 1 B there."""

    unaligned: float = 0.95 * TERA
    """Of half-precision products for each processor, if rows do not begin at multiples of 16 bytes. Fitted to GPT-2
    on an H200, whose vocabulary of 50,257 had products take six times as long."""

    attention: float = 0.60
    """Of the products that a card's power sustains, in fused attention."""

    launch: float = 10 * MICROSECOND
    """Of the host, for an operation that starts a kernel."""

    next_launch: float = 0.5
    """Of `launch`, for each further kernel of an operation."""

    kernel: float = 3 * MICROSECOND
    """What a kernel takes on the card in addition to its work. Chosen by the published runs of PEFT, as is `cached`."""

    cached: float = 2.0
    """How many times the bandwidth the smallest kernels have in the level 2 cache. The gain falls linearly with a
    kernel's bytes, to none at twice the cache's size."""

    link: float = 0.8
    """Of a link's rate."""

    collective: float = 20 * MICROSECOND
    """The least that a collective takes."""


CONSTANTS = Constants()


@dataclass(frozen=True)
class Correction:
    """How much longer than predicted a card and a host were seen to take."""

    card: float = 1.0
    host: float = 1.0


UNCORRECTED = Correction()
SPREADS = {"card": 0.2, "host": 0.8}
"""Standard deviations of the logarithm of what a `Correction` holds."""

SLOW_HOST = 3.3
"""How much longer than `Constants.launch` the host of the H200 took that we measured, a virtual machine on a Xeon."""


@dataclass
class StepSeconds:
    """How long a step takes, and what of."""

    seconds: float
    limits: dict[str, float] = field(default_factory=dict)
    """Seconds that the card spent on, or waited for, each of `LIMITS`; together they are `seconds`."""

    lines: dict[str, dict[str, float]] = field(default_factory=dict)
    """Of each limit, seconds by line of code."""

    @property
    def limit(self) -> str:
        """What takes most of the step."""
        return max(self.limits, key=lambda name: self.limits[name], default="memory")


def seconds_of_step(
    work: StepWork, card: Gpu, correction: Correction = UNCORRECTED, constants: Constants = CONSTANTS
) -> StepSeconds:
    """Return how long a step takes that follows others like it.

    The host asks, and is late where kernels are short; the card does one thing after another; a link carries
    collectives meanwhile, and the card waits where it needs what has not arrived. The optimizer's last kernel is the
    end: the next step begins with what the host has asked for by then.
    """
    return _Clocks(work, card, correction, constants).play()


class _Clocks:
    def __init__(self, work: StepWork, card: Gpu, correction: Correction, constants: Constants) -> None:
        self._work, self._constants = work, constants
        self._launch = constants.launch * correction.host
        self._durations = [correction.card * _duration(one, card, constants) for one in work.operations]
        self._host = self._card = self._link = self._bus = self._began = 0.0
        self._arrivals: list[float] = []  # of the collectives that were asked for
        self._spent: defaultdict[tuple[str, str], float] = defaultdict(float)  # seconds by limit and line

    def play(self) -> StepSeconds:
        for _ in range(TURNS):
            self._spent.clear()
            self._began = max(self._card, self._host)
            for number in self._work.order:
                self._ask_for(self._work.operations[number], self._durations[number])
            self._wait_until(max(self._link, self._bus), "communication" if self._link >= self._bus else "transfers")
        ended = max(self._card, self._host)
        self._spent["host", ""] += ended - self._card
        result = StepSeconds(ended - self._began)
        for (limit, where), seconds in self._spent.items():
            result.limits[limit] = result.limits.get(limit, 0.0) + seconds
            of_limit = result.lines.setdefault(limit, {})
            of_limit[where] = of_limit.get(where, 0.0) + seconds
        return result

    def _ask_for(self, one: Operation, seconds: float) -> None:
        if one.kind == "wait":
            self._host = max(self._host, self._card)
        elif one.kind == "arrival":
            if one.ranks < len(self._arrivals):
                self._wait_until(self._arrivals[-1 - one.ranks], "communication", one.where)
        elif one.kind == "collective":
            self._host += self._launch
            # Sums need what has been computed, and what is gathered has come out of the step before.
            ready = self._began if "gather" in one.name else self._card
            self._link = max(self._link, self._host, ready) + seconds
            self._arrivals.append(self._link)
        elif one.kind == "transfer":
            self._host += self._launch
            self._bus = max(self._bus, self._host) + seconds
        else:
            if one.launches:
                self._host += self._launch * (1 + (one.launches - 1) * self._constants.next_launch)
            self._wait_until(self._host, "host", one.where)
            self._card += seconds
            self._spent[_LIMIT_OF[one.kind], one.where] += seconds

    def _wait_until(self, moment: float, limit: str, where: str = "") -> None:
        if moment > self._card:
            self._spent[limit, where] += moment - self._card
            self._card = moment


def _duration(one: Operation, card: Gpu, constants: Constants) -> float:
    """Return the seconds that an operation takes where it runs, were it alone."""
    if one.kind in ("wait", "arrival"):
        return 0.0
    if one.kind == "transfer":
        return one.bytes / (card.bus * GIGA)
    if one.kind == "collective":
        return _collective(one, card, constants)
    bandwidth = card.bandwidth * GIGA * constants.bandwidth
    if one.kind == "kernel":
        bandwidth = min(bandwidth, card.processors * constants.in_flight)
        bandwidth *= 1 + (constants.cached - 1) * max(1 - one.bytes / (2 * card.cache_mib * MIB), 0.0)
    seconds = one.bytes / bandwidth
    if one.flops:
        share = constants.attention if one.kind == "attention" else constants.product
        if one.kind == "product" and len(one.shape) > 2:
            share *= useful_share(one.shape, card.processors)
        rate = sustained(card, one.dtype) * TERA * share
        if not one.is_aligned:
            rate = min(rate, card.processors * constants.unaligned)
        seconds = max(seconds, one.flops / rate)
    return seconds + constants.kernel * max(one.launches, 1)  # a graph launches its kernels itself


def _collective(one: Operation, card: Gpu, constants: Constants) -> float:
    if one.ranks < 2:
        return 0.0
    rate = card.link or card.bus
    if one.ranks > IN_MACHINE:  # a machine needs each byte once, whichever of its cards the network brings it to
        rate = min(rate, IN_MACHINE * card.network)
    times = 2 if "reduce" in one.name.replace("reduce_scatter", "") else 1  # reduced, and handed out again
    moved = times * one.bytes * (one.ranks - 1) / one.ranks
    return constants.collective + moved / (rate * GIGA * constants.link)


def sustained(card: Gpu, dtype: str) -> float:
    """Return the teraflops that a card keeps up in large products of a type: its power is the limit, or its peak."""
    is_half_rate = card.peak_tflops < 2.5 * card.single_tflops and card.capability >= (8, 0)
    most = MOST_OF_HALF_RATE if is_half_rate else MOST_OF_PEAK
    half = min(most * card.peak_tflops, PER_WATT.get(card.capability[0], math.inf) * card.watts)
    if dtype.startswith("float8") and card.capability >= (8, 9):
        return 2 * half
    if dtype == "tf32" and card.capability >= (8, 0):
        return half / 2
    lacks_tensor_cores = dtype == "bfloat16" and card.capability < (8, 0)  # which take it since Ampere
    if dtype in ("float32", "tf32") or lacks_tensor_cores:
        has_shared_pipes = card.capability > (8, 0)
        return card.single_tflops * (SHARED_PIPES if has_shared_pipes else 1.0)
    if dtype == "float64":
        return card.single_tflops / (2 if card.capability in ((6, 0), (7, 0), (8, 0), (9, 0)) else 32)
    return half


def useful_share(shape: Sequence[int], processors: int) -> float:
    """Return the share of the processors' work on a product that is of use.

    A product is made of tiles, which go out to the processors in waves: a tile that reaches beyond the matrix and a
    last wave that leaves processors idle are lost. Sums may be taken in parts, each as another tile. The best counts,
    as cuBLAS chooses among such kernels.

    Args:
        shape: Batches, rows, columns and the length of the sums.
        processors: Of the card.
    """
    *batches, rows, columns, sums = shape
    if min(rows, columns) < NARROW:
        return 1.0
    number = math.prod(batches or [1])
    best = 0.0
    for height, width, rate in TILES:
        tiles = number * math.ceil(rows / height) * math.ceil(columns / width)
        for parts in PARTS_OF_SUMS:
            if parts > 1 and sums < parts * LEAST_OF_SUMS:
                break
            waves = math.ceil(tiles * parts / processors)
            done = number * rows * columns * parts / (waves * processors * height * width)
            best = max(best, rate * (OF_PARTS if parts > 1 else 1.0) * done)
    return best


def correction_for(measured: float, work: StepWork, card: Gpu) -> Correction:
    """Return the correction by which a step takes as long as it was measured to take.

    It is the host's, or the card's with its links: of those that explain the time, the one that is less unlikely. By
    `SPREADS`, a host that takes twice as long is as likely as a card that takes a fifth longer.
    """
    corrections = []
    for name, spread in SPREADS.items():
        low, high = 0.05, 20.0
        for _ in range(40):
            middle = math.sqrt(low * high)
            took = seconds_of_step(work, card, replace(UNCORRECTED, **{name: middle})).seconds
            low, high = (middle, high) if took < measured else (low, middle)
        factor = math.sqrt(low * high)
        corrected = replace(UNCORRECTED, **{name: factor})
        explains = abs(seconds_of_step(work, card, corrected).seconds / measured - 1) < 0.01
        corrections.append((not explains, abs(math.log(factor)) / spread, corrected))
    return min(corrections, key=lambda each: each[:2])[2]


def largest_lines(lines: Mapping[str, float], most: int = 3) -> list[tuple[str, float]]:
    """Return the lines of code that take most, with their seconds."""
    return sorted(((where, took) for where, took in lines.items() if where), key=lambda line: -line[1])[:most]
