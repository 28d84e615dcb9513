"""Evidence that parts of a batch add up to it, in the loss and in its gradient, from running both.

Before training, four groups of samples run alone and all together, in training mode, with the weights as they are and
with slightly others: where a policy equals its reference, or all losses are the logarithm of the vocabulary, much looks
alike. In training, an audit compares the gradient of two parts with that of their union. Meanwhile random numbers do
not depend on the batch that they are drawn for (:mod:`adaptive_batching._without_chance`), so that dropout makes no
difference.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from adaptive_batching._device import RandomState
from adaptive_batching._tensors import hash_of, plain_parts
from adaptive_batching._without_chance import WithoutChance

Sample = TypeVar("Sample")
Batch = TypeVar("Batch")
T = TypeVar("T")

_FIRST = 2**16  # numbers of each tensor that are changed, or compared


def in_groups(samples: Sequence[Sample], kind_of: Callable[[Sample], Any], *, most: int = 7) -> list[list[Sample]]:
    """Return up to four groups of one to three of ``samples``, which come in the order of their preference.

    As many as possible differ in ``kind_of``: their length, their labels, and the number of these.
    """
    first_of_kind: dict[Any, Sample] = {}
    others: list[Sample] = []
    for sample in samples:
        kind = kind_of(sample)
        if kind in first_of_kind:
            others.append(sample)
        else:
            first_of_kind[kind] = sample
    chosen = [*first_of_kind.values(), *others][: min(most, len(samples), 7)]
    sizes = {0: [], 1: [1], 2: [1, 1], 3: [1, 2], 4: [1, 1, 2], 5: [1, 1, 1, 2], 6: [1, 1, 2, 2], 7: [1, 1, 2, 3]}
    groups, start = [], 0
    for size in sizes[len(chosen)]:
        groups.append(chosen[start : start + size])
        start += size
    return groups


def error_of_sum(parts: Iterable[float], whole: float) -> float:
    """Return how far ``whole`` is from the sum of ``parts``, relative to what they are made of; inf if one is NaN."""
    parts = list(parts)
    error = abs(math.fsum(parts) - whole) / max(abs(whole), math.fsum(map(abs, parts)), 1e-30)
    return error if math.isfinite(error) else math.inf


@dataclass(frozen=True)
class Losses(Generic[T]):
    """Results of running groups of samples and their union, with the weights as they are and slightly perturbed."""

    runs: list[tuple[list[T], T]]
    """(of the groups, of their union), for each of the two."""

    rounding: float
    """The error of a sum that rounding explains."""

    are_drawn: bool
    """True if the same samples have given something else with other random numbers."""

    change: float
    """How much the loss changes from a forward to the next, on the same samples with the same random numbers."""

    @property
    def add_up(self) -> bool:
        """True if what is given, numbers, adds up."""
        return self.error(lambda values: values) <= self.rounding  # type: ignore[arg-type, return-value]

    def error(self, sums: Callable[[T], Sequence[float]]) -> float:
        """Return the largest error of the sums that ``sums`` makes of what has been given."""
        errors = [0.0]
        for groups, union in self.runs:
            of_groups = list(map(sums, groups))
            errors += [error_of_sum(parts, whole) for *parts, whole in zip(*of_groups, sums(union), strict=True)]
        return max(errors)


def losses_of_groups(
    groups: Sequence[list[Sample]],
    run: Callable[[list[Sample]], T],
    parameters: Sequence[nn.Parameter],
    start_over: Callable[[], None],
    device: torch.device,
) -> Losses[T]:
    """Run each group of samples, and all of them together, from the same state.

    ``run`` returns numbers on the host, the loss first.
    """
    together = [sample for group in groups for sample in group]
    runs = []
    with WithoutChance() as mode, torch.compiler.set_stance("force_eager"):
        for weights in (contextlib.nullcontext, lambda: perturbed(parameters)):
            values = []
            for group in (*groups, together):
                start_over()
                with weights():
                    values.append(without_gradients(run, group))
            runs.append((values[:-1], values[-1]))
        start_over()
        random_state = RandomState(device)
        again: list[Any] = []
        without_gradients(run, together)  # an average of weights, which follows them, begins with them
        with perturbed(parameters):
            for draws_anew in (False, False, True):
                if not draws_anew:
                    random_state.put_back()
                again.append(without_gradients(run, together))
    first, second, drawn = (float(torch.as_tensor(losses[0])) for losses in again)
    return Losses(
        runs, mode.rounding[0], are_drawn=first == second != drawn,
        change=error_of_sum([first], second),
    )  # fmt: skip


def without_gradients(run: Callable[[Batch], T], samples: Batch) -> T:
    """Run a forward that keeps no activations, unless the loss takes gradients itself, such as a penalty on them."""
    try:
        with torch.no_grad():
            return run(samples)
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
    return run(samples)


@functools.cache
def _noise() -> torch.Tensor:
    """Return numbers of a normal distribution, drawn by Python, as torch draws none within :class:`WithoutChance`."""
    draw = random.Random(0)
    return torch.tensor([draw.gauss(0.0, 1.0) for _ in range(_FIRST)])


@contextlib.contextmanager
def perturbed(parameters: Iterable[nn.Parameter], *, in_last_place: bool = False) -> Iterator[None]:
    """Change what is trained of ``parameters`` inside, the first numbers of each tensor: by some percent, or rounding.

    ``in_last_place`` is True for as little as rounding changes each number.
    """
    saved: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        with torch.no_grad():
            for parameter in parameters:
                if not parameter.requires_grad or not parameter.is_floating_point():
                    continue
                for part in plain_parts(parameter):
                    first = _first_of(part)
                    saved.append((first, first.clone()))
                    noise = _noise().roll(len(saved))[: first.numel()].view(first.shape).to(first.device)
                    if in_last_place:
                        first += first * (noise * torch.finfo(first.dtype).eps).to(first.dtype)
                        continue
                    scale = float(first.float().square().mean().sqrt()) if first.numel() else 0.0
                    first += (noise * 0.1 * (scale or 0.1)).to(first.dtype)
        yield
    finally:
        with torch.no_grad():
            for first, values in saved:
                first.copy_(values)


def _first_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of about the first 2^16 numbers of a tensor: of whole rows, or of a part of the first."""
    while tensor.dim() > 0 and tensor.numel() > _FIRST:
        rows = max(_FIRST // max(tensor[0].numel(), 1), 1)
        tensor = tensor[:rows] if rows > 1 or tensor.dim() == 1 else tensor[0]
    return tensor


def _first_rows(sparse: torch.Tensor) -> torch.Tensor:
    """Return what :func:`_first_of` would return of a sparse tensor, were it a dense one."""
    rows = min(max(_FIRST // max(sparse[0].numel(), 1), 1), len(sparse)) if sparse.numel() > _FIRST else len(sparse)
    return _first_of(torch.narrow_copy(sparse, 0, 0, rows).to_dense())


class GradientSketch:
    """Some numbers of each gradient, which take little memory, and the norm of all of it: enough to tell two apart."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._firsts: list[torch.Tensor] = []
        self._norms: list[float] = []
        for parameter in parameters:
            if parameter.requires_grad:
                # No gradient counts as zeros: what no sample of a part has used may be used by others.
                share = 0 if parameter.grad is None else 1
                if (gradient := parameter.grad) is not None and gradient.layout == torch.sparse_coo:  # of an embedding
                    gradient = gradient.coalesce()
                    self._firsts.append(_first_rows(gradient).to("cpu", torch.float32))
                    self._norms.append(float(gradient.values().float().norm()))
                    continue
                parts = plain_parts(parameter if parameter.grad is None else parameter.grad)
                self._firsts += [share * _first_of(part).to("cpu", torch.float32, copy=True) for part in parts]
                self._norms += [share * float(part.float().norm()) for part in parts]

    @property
    def norm(self) -> float:
        return math.sqrt(math.fsum(norm**2 for norm in self._norms))

    def distance(self, other: GradientSketch) -> float:
        """Return a lower bound of the L2 norm of the difference; inf if a gradient is not finite."""
        pairs = zip(self._firsts, other._firsts, strict=True)
        of_firsts = math.sqrt(math.fsum(float((mine - theirs).square().sum()) for mine, theirs in pairs))
        of_norms = [abs(mine - theirs) for mine, theirs in zip(self._norms, other._norms, strict=True)]
        distance = max(of_firsts, math.sqrt(math.fsum(norm**2 for norm in of_norms)))
        return distance if math.isfinite(distance) else math.inf


def gradient_error(
    parameters: Sequence[nn.Parameter],
    together: Callable[[], bool],
    apart: Callable[[], bool],
    start_over: Callable[[], None],
) -> tuple[float, float] | None:
    """Return the error of the gradient of parts that ran ``apart``, and the error that rounding explains.

    Both leave gradients in ``parameters``, and return False if memory has run out. Then nothing is known, as with a
    gradient that is not finite, and the result is None. The error is inf if a run changes what is trained, or
    if hooks take gradients away, as those of an optimizer that steps within backward.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    before = list(map(hash_of, trained))
    sketches = []
    with WithoutChance() as mode, torch.compiler.set_stance("force_eager"):
        for run in (together, apart):
            start_over()
            with _taken_away(trained) as taken:
                if not run():
                    return None
            # Values alone would not show an optimizer whose learning rate is still zero.
            if any(taken) or list(map(hash_of, trained)) != before:
                return math.inf, mode.rounding[1]
            sketches.append(GradientSketch(parameters))
    expected, actual = sketches
    scale = max(expected.norm, actual.norm)
    if not math.isfinite(scale):
        return None
    # Finite gradients are at most 2 apart; one that is not finite in a part alone is as wrong.
    return (min(expected.distance(actual) / scale, 2.0) if scale else 0.0), mode.rounding[1]


@contextlib.contextmanager
def _taken_away(parameters: Iterable[nn.Parameter]) -> Iterator[list[bool]]:
    """Give a list that gets, of each gradient which hooks have had inside, if they have taken it away."""
    taken: list[bool] = []
    with contextlib.ExitStack() as stack:
        for parameter in parameters:
            if getattr(parameter, "_post_accumulate_grad_hooks", None):  # ours comes after these
                handle = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda parameter: taken.append(parameter.grad is None)
                )
                stack.callback(handle.remove)
        yield taken
