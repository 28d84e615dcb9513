"""From the samples of a batch to micro-batches, and out of memory, to smaller ones that run again."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import torch

from adaptive_batching._device import RandomState
from adaptive_batching._out_of_memory import is_out_of_memory
from adaptive_batching._probe.does_not_fit import DoesNotFitError
from adaptive_batching._ranks.agree import ALONE
from adaptive_batching._snapshot import StepState
from adaptive_batching._step.forward_cost import ForwardCost
from adaptive_batching._step.limits import TokenLimit
from adaptive_batching._step.retry import Retry
from adaptive_batching._step.split import (
    Capacity,
    in_known_sizes,
    padded_tokens,
    split_by_length,
    split_in_order,
)
from adaptive_batching._torchtune.stock.compiling import MAX_COMPILED_SIZES, compiles_each_size
from adaptive_batching._torchtune.stock.data import Sample, index_of
from adaptive_batching._torchtune.stock.host import Host
from adaptive_batching._torchtune.stock.objective import Counts, Objective
from adaptive_batching._values import ByLength, Fixed, SplitSize, Whole

log = logging.getLogger(__name__)

# In tokens, besides its own, until it has been measured: while the kernels of a model are launched, the device could
# compute some hundreds of tokens more.
FIRST_FORWARD_COST = 512

CONSECUTIVE_RECOVERIES_TO_WARN = 3


@dataclass(frozen=True)
class MicroBatch:
    """Samples of one forward and backward."""

    samples: list[Sample]
    tokens: int  # padded; of multimodal samples, their number
    weight: float | None = None  # factor of the mean loss; None for the number of its labels, as in stock
    num_tokens: int | None = None  # that it stands for in the sums of a step; None for its own

    @property
    def is_filler(self) -> bool:
        """True for a zero-weight batch that only equalizes forward counts across ranks."""
        return self.weight == 0


@dataclass
class SplitPolicy:
    """The way in which batches are split, and what has been learned about it while training."""

    size: SplitSize = field(default_factory=Whole)
    capacity: Capacity | None = None  # of a forward, where memory bounds it; multimodal samples count as one token each
    cost: ForwardCost = field(default_factory=ForwardCost)
    limit: TokenLimit = field(default_factory=TokenLimit)
    is_stock: bool = True  # batches are not split while all fits, so that ranks need not agree

    @property
    def most_samples(self) -> int | None:
        """Most samples of the longest length in a forward; None for a whole batch."""
        if isinstance(self.size, Fixed):
            return self.size.samples
        return None if self.capacity is None else self.capacity.points[0][1]


class Splitter:
    """Splits batches as ``execution`` says; if it ``learns``, every forward is timed, whatever the split."""

    def __init__(self, host: Host, split_policy: SplitPolicy, *, learns: bool = False) -> None:
        self._objective, self._ranks, self._device = host.objective, host.ranks, host.device
        self._split_policy, self._limit = split_policy, split_policy.limit
        self._learns = learns or isinstance(split_policy.size, ByLength)
        # With optimizers in the backward pass of many devices a batch cannot be split.
        few_sizes = compiles_each_size(host.loader.dataset) and (host.ranks.size == 1 or not host.steps_in_backward)
        self._compiled_sizes: set[int] | None = set() if few_sizes else None
        self._said_that_sizes_are_few = False
        self._events: list[tuple[int, torch.Event, torch.Event]] = []

    def split(self, batch: list[Sample], min_parts: int = 1, *, in_order: bool = False) -> list[MicroBatch]:
        """Return micro-batches with the gradient of ``batch``, at least ``min_parts`` where it has as many samples.

        With ``in_order`` samples keep their order where memory is short as well, so that all parts are drawn alike.
        """
        parts = self._parts(batch, min_parts, in_order=in_order)
        in_parts = self._split_policy.most_samples is not None or self._limit.max_tokens is not None
        # Otherwise every rank has one part, or as many as sizes have been compiled.
        in_parts = in_parts or isinstance(self._split_policy.size, ByLength) or len(parts) > 1 or min_parts > 1
        in_parts = in_parts or (self._compiled_sizes is not None and not self._split_policy.is_stock)
        micro_batches = self._of_parts(parts)
        return self._as_many_on_every_rank(micro_batches, batch) if in_parts else micro_batches

    def of_parts(self, parts: Sequence[list[Sample]], batch: list[Sample]) -> list[MicroBatch]:
        """Return the micro-batches of these parts of a batch of their own, as many on every rank."""
        return self._as_many_on_every_rank(self._of_parts(list(parts)), batch)

    def split_together(self, window: list[list[Sample]]) -> list[MicroBatch]:
        """Return the micro-batches of a step, its samples sorted together as far as :func:`_of_equal_share` allows."""
        groups = _of_equal_share(window, self._objective)
        micro_batches = [each for group in groups for each in self._of_parts(self._parts(group))]
        return self._as_many_on_every_rank(micro_batches, window[0])

    def split_apart(self, window: list[list[Sample]], first: int) -> list[list[MicroBatch]]:
        """Return the micro-batches of up to ``first`` samples of ``window``, and of the rest; none without targets."""
        group, *others = _of_equal_share(window, self._objective)
        apart, rest = self._weighted([self._parts(group[:first]), self._parts(group[first:]) if group[first:] else []])
        rest += [each for other in others for each in self._of_parts(self._parts(other))]
        return [self._as_many_on_every_rank(micro_batches, window[0]) for micro_batches in (apart, rest)]

    def _of_parts(self, parts: list[list[Sample]]) -> list[MicroBatch]:
        return [self._micro_batch(parts[0])] if len(parts) == 1 else self._weighted([parts])[0]

    def _sizes(self, samples: Sequence[Sample]) -> list[int]:
        return [self._objective.size(sample) for sample in samples]

    def _parts(self, batch: list[Sample], min_parts: int = 1, *, in_order: bool = False) -> list[list[Sample]]:
        split_policy = self._split_policy
        if isinstance(split_policy.size, ByLength):
            assert split_policy.capacity is not None, "split by length without a probe"
            cost = min(split_policy.cost.in_tokens(FIRST_FORWARD_COST), split_policy.capacity.tokens)
            split = split_by_length(self._sizes(batch), split_policy.capacity, cost)
        else:
            split = split_in_order(len(batch), split_policy.most_samples or len(batch))
        if len(split) < min_parts:
            split = split_in_order(len(batch), max(len(batch) // min_parts, 1))
        parts = [[batch[i] for i in indices] for indices in split]
        if self._limit.max_tokens is not None:
            most_tokens = self._limit.max_tokens
            parts = [part for whole in parts for part in self._split_to(whole, most_tokens, in_order=in_order)]
        return parts if self._compiled_sizes is None else self._of_few_sizes(parts, self._compiled_sizes)

    def _split_to(self, part: list[Sample], max_tokens: int, *, in_order: bool) -> list[list[Sample]]:
        lengths = self._sizes(part)
        if padded_tokens(lengths) <= max_tokens:
            return [part]
        capacity = Capacity.of_tokens(max_tokens)
        if in_order:
            split = split_in_order(len(part), capacity.samples(max(lengths)))
        else:  # what a forward costs is not known here; a high price keeps their number low
            split = split_by_length(lengths, capacity, forward_cost=max_tokens)
        return [[part[i] for i in indices] for indices in split]

    def _of_few_sizes(self, parts: list[list[Sample]], known: set[int]) -> list[list[Sample]]:
        """Return ``parts``, or pieces of them, so that no more sizes have to be compiled than are worth it."""
        pieces = []
        for part in parts:
            start, sizes_of_pieces = 0, in_known_sizes(len(part), known, MAX_COMPILED_SIZES)
            if len(sizes_of_pieces) > 1 and not self._said_that_sizes_are_few:
                self._said_that_sizes_are_few = True
                log.info(
                    "running %d packs as %s: attention is already compiled for %d numbers of packs, and not again for "
                    "every new one", len(part), sizes_of_pieces, len(known),
                )  # fmt: skip
            for size in sizes_of_pieces:
                known.add(size)
                pieces.append(part[start : start + size])
                start += size
        return pieces

    def _micro_batch(
        self, samples: list[Sample], weight: float | None = None, num_tokens: int | None = None
    ) -> MicroBatch:
        return MicroBatch(samples, padded_tokens(self._sizes(samples)), weight, num_tokens)

    def _weighted(self, groups: list[list[list[Sample]]]) -> list[list[MicroBatch]]:
        # A recipe's loss is a mean over terms, and stock multiplies it by a weight, which parts share by their terms.
        # A part of truncated samples can be all prompt: its share is nothing, and its mean loss would be 0/0.
        counted = [[(part, self._objective.counts(part)) for part in group] for group in groups]
        counts = [count for group in counted for _, count in group]
        whole = Counts(sum(count.terms for count in counts), sum(count.tokens for count in counts))
        if whole.terms == 0:
            return [[self._micro_batch(groups[0][0])], *([] for _ in groups[1:])]  # 0/0, as in stock
        weight = self._objective.weight_of(whole)
        # Parts without terms can have tokens, as the first label of each sample; they count in the divisor.
        left = sum(count.tokens for count in counts if count.terms == 0)
        weighted: list[list[MicroBatch]] = []
        for group in counted:
            weighted.append([])
            for part, count in group:
                if count.terms > 0:
                    num_tokens = count.tokens + left if left else None
                    weighted[-1].append(self._micro_batch(part, count.terms * weight / whole.terms, num_tokens))
                    left = 0
        return weighted

    def _as_many_on_every_rank(self, micro_batches: list[MicroBatch], batch: list[Sample]) -> list[MicroBatch]:
        """Fill up with zero-weight batches: FSDP needs as many forwards on every rank."""
        missing = int(self._ranks.largest(len(micro_batches))) - len(micro_batches)
        if not missing:
            return micro_batches
        filler = self._objective.filler(batch)
        return micro_batches + [MicroBatch([filler], self._objective.size(filler), weight=0.0, num_tokens=0)] * missing

    @contextlib.contextmanager
    def timed(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Time a forward and backward of ``micro_batch``, if that is of use."""
        if not self._learns:
            yield
            return
        device, tokens = self._device, micro_batch.tokens
        if device.type == "cpu":
            start = time.perf_counter()
            yield
            self._split_policy.cost.observe(tokens, time.perf_counter() - start)
            return
        # Events are read when the step is over, so that the device is not waited for in between.
        begin, end = torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)
        begin.record()
        yield
        end.record()
        self._events.append((tokens, begin, end))

    def read_timings(self) -> None:
        for tokens, begin, end in self._events:
            end.synchronize()
            self._split_policy.cost.observe(tokens, begin.elapsed_time(end) / 1000)
        self._events.clear()

    def forget_timings(self) -> None:
        self._events.clear()


def _of_equal_share(window: list[list[Sample]], objective: Objective) -> list[list[Sample]]:
    """Group the samples of batches that give equal weight to each term of their loss; the largest group comes first.

    In SFT stock multiplies a batch's mean loss over targets by the number of its labels. Where the first label of a
    sample counts as one, batches differ in the weight of a target.
    """
    groups: dict[Fraction, list[Sample]] = {}
    without_terms: list[Sample] = []
    for samples in window:
        counts = objective.counts(samples)
        if counts.terms:
            groups.setdefault(Fraction(counts.tokens, counts.terms), []).extend(samples)
        else:
            without_terms += samples  # 0/0 in stock
    if not groups:
        return [without_terms]
    largest, *others = sorted(groups.values(), key=len, reverse=True)
    return [largest + without_terms, *others]


class Recovery(Retry[MicroBatch]):
    """Lets the batches of an optimizer step run again after one ran out of memory, or if not ``recovers``, says how to.

    Nothing is lost or repeated: the gradients of the whole window are discarded, and random numbers start over.
    ``find_batch_dependent_module`` names a module that computes over the batch, or returns None. ``probed_tokens`` are
    padded, of the largest forward that the probe has seen to fit.
    """

    dataset = "the dataset"
    batch_key = "batch_size"

    def __init__(
        self,
        host: Host,
        limit: TokenLimit,
        find_batch_dependent_module: Callable[[], str | None],
        *,
        recovers: bool = True,
        probed_tokens: int = 0,
    ) -> None:
        together = host.recovers_together  # else a rank that fails does not know of the others, which wait elsewhere
        ranks = host.ranks if together else ALONE
        super().__init__(limit, host.device, ranks, enabled=recovers and together, largest_that_ran=probed_tokens)
        self._host = host
        self._find_batch_dependent_module = find_batch_dependent_module
        self._recovers = recovers
        self.state = StepState(list(host.models))
        self._random_state: RandomState | None = None
        self._recovered_in_row, self._warned = 0, False

    def start(self) -> None:
        super().start()
        if self._host.backward_optimizers is not None:
            self._host.backward_optimizers.updated = False
        if self._recovers:
            self._random_state = RandomState(self._host.device)
            self.state.save()

    def end_step(self) -> None:
        super().end_step()
        if self._recovers:
            self.state.end()
        self._recovered_in_row = self._recovered_in_row + 1 if self.failures else 0
        if self._recovered_in_row == CONSECUTIVE_RECOVERIES_TO_WARN and not self._warned:
            self._warned = True
            log.warning(
                "every step first runs out of memory: training crawls. Set a smaller batch_size or micro_batch_size, "
                "or %s", self.less_memory(),
            )  # fmt: skip

    @property
    def num_recoveries(self) -> int:
        return self.limit.num_recoveries

    @contextlib.contextmanager
    def fatal(self) -> Iterator[None]:
        """Turn running out of memory inside into an error: parameters may be updated in part."""
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise DoesNotFitError(
                "out of memory in the optimizer's step, which may have updated only some parameters; resume from the "
                "last checkpoint, with use_maximum_batch_size=True, or a batch_size below "
                f"{self._host.loader.batch_size}, or {self.less_memory()}"
            ) from error

    def size(self, part: MicroBatch) -> tuple[int, int]:
        return len(part.samples), part.tokens

    def describe(self, part: MicroBatch) -> str:
        plural = "s" if len(part.samples) > 1 else ""
        longest = max(len(self._host.objective.tokens(sample)) for sample in part.samples)
        return f"{len(part.samples)} sample{plural} of up to {longest} tokens"

    def longest(self, part: MicroBatch) -> int | None:
        return max(map(self._host.objective.size, part.samples))  # tokens of a rollout are on the device

    def name_of_longest(self, part: MicroBatch) -> str:
        number = index_of(max(part.samples, key=lambda sample: len(self._host.objective.tokens(sample))))
        return "" if number is None else f"number {number} of {self.dataset} (the first is 0)"

    def unit(self, part: MicroBatch) -> str:
        return "padded tokens" if self._host.objective.is_text(part.samples[0]) else "samples"

    def shorter(self, part: MicroBatch) -> str:
        held = ""
        if self._host.steps_in_backward and self.limit.max_tokens is not None:
            held = f", on top of {size_of_gradients(self._host)} of gradients that a split batch has to hold"
        sample = part.samples[0]
        tokens = self._host.objective.tokens(sample)
        start = [int(token) for token in tokens[:12]]
        return (
            f"{held}: number {index_of(sample)} of {self.dataset} (the first is 0), which begins with the tokens "
            f"{start}. Set tokenizer.max_seq_len below {len(tokens)}, or {self.less_memory()}"
        )

    def smaller_batch(self) -> str:
        return f"set a smaller {self.batch_key}"

    def less_memory(self) -> str:
        return remedy(self._host)

    def why_never(self, part: MicroBatch) -> str | None:
        what = f"out of memory in a forward or backward of {self.describe(part)}"
        if self._host.backward_optimizers is not None and self._host.backward_optimizers.updated:
            return (
                f"{what}, after its backward had updated parameters (optimizer_in_bwd=True), so it cannot run again; "
                f"resume from the last checkpoint, with a batch_size below {self._host.loader.batch_size}, or "
                f"{self.less_memory()}"
            )
        if not self._recovers:
            return f"{what}; set adaptive_batching.recover_from_oom=True to run it in smaller parts"
        if not self._host.recovers_together:
            return (
                f"{what}; it cannot run in smaller parts: {self._host.why_no_recovery}. {self.smaller_batch()}, or "
                f"{self.less_memory()}"
            )
        return None

    def batch_dependent_module(self) -> str | None:
        return self._find_batch_dependent_module()

    def price_of_parts(self) -> str:
        if not self._host.steps_in_backward:
            return ""
        return f", which holds {size_of_gradients(self._host)} of gradients until the last of them"

    def put_back(self) -> None:
        self._host.objective.equalize_collectives()
        if self._random_state is not None:
            self._random_state.put_back()
        self.state.put_back()


class ValidationRecovery(Recovery):
    what = "samples of dataset_val"
    dataset = "dataset_val"
    batch_key = "batch_size_val"


def size_of_gradients(host: Host) -> str:
    num_bytes = sum(parameter.nbytes for parameter in host.model.parameters() if parameter.requires_grad)
    return f"{num_bytes / 2**20:,.0f} MiB"


def remedy(host: Host) -> str:
    """Return the next setting that saves memory, and what says before the next run whether it saves enough."""
    ways = host.objective.saves_memory_by
    can_offload = "offloading" in ways and host.device.type == "cuda"  # elsewhere stock refuses to
    if not host.checkpoints_activations:
        setting = "enable_activation_checkpointing=True"
    elif can_offload and not host.offloads_activations:
        setting = "enable_activation_offloading=True"
    else:
        setting = "a model with quantized weights, as in QLoRA" if "lora" in ways else "a smaller model"
    return f"{setting}; 'adaptive-batching plan', with the config and overrides of this run, says what fits"
