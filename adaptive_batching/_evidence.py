"""Evidence that parts of a batch add up to it, in the loss and in its gradient, from running both.

Before training, four groups of samples run alone and all together, in training mode, with the weights as they are and
with slightly others: where a policy equals its reference, or all losses are the logarithm of the vocabulary, much looks
alike. In training, an audit compares the gradient of two parts with that of their union. Random numbers do not depend
on the batch that they are drawn for meanwhile (:class:`WithoutChance`), so that dropout makes no difference.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from adaptive_batching._device import RandomState
from adaptive_batching._snapshot import plain_parts

Sample = TypeVar("Sample")
T = TypeVar("T")

# Errors that rounding explains, of a sum of losses relative to its terms, and of a gradient. TF32 rounds what goes in,
# which is the same in any batch.
_ROUNDING = {torch.bfloat16: (2e-2, 1e-1), torch.float16: (5e-3, 3e-2)}
_ROUNDING_OF_SINGLE = (1e-4, 1e-4)
# Of a model that rounds itself, as if it were quantized: rounding may send a number to the next level.
_ROUNDING_OF_LEVELS = (2e-2, 1e-1)
_LEVELS = {"round", "round_", "fake_quantize_per_tensor_affine", "fake_quantize_per_channel_affine"}
_FIRST = 2**16  # numbers of each tensor that are changed, or compared
_GOLDEN = (math.sqrt(5) - 1) / 2


class WithoutChance(TorchFunctionMode):
    """Draw no random numbers in torch's functions inside: what they return depends on the last dimension alone.

    So a sample meets the same numbers in any batch. Dropout leaves everything as it is, and noise is its mean. A
    permutation reverses, so that samples that are mixed with each other are found out.

    :attr:`dtypes` are those of what functions have returned, which tell what rounding can do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()
        self._has_levels = False
        self._num_calls = 0
        self._entered: list[bool] = []  # for each module that runs: True if that has entered this mode
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> WithoutChance:
        super().__enter__()  # type: ignore[no-untyped-call]
        if not self._hooks:
            # In a backward pass no mode is active, and checkpointed layers would run again otherwise than they have.
            self._hooks = [
                register_module_forward_pre_hook(self._enter_again),
                register_module_forward_hook(self._leave_again, always_call=True),
            ]
        return self

    def __exit__(self, *error: Any) -> None:
        if not self._entered:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _enter_again(self, module: nn.Module, args: Any) -> None:
        before = self._num_calls
        torch.empty(0)
        is_active = self._num_calls != before
        if not is_active:
            super().__enter__()  # type: ignore[no-untyped-call]
        self._entered.append(not is_active)

    def _leave_again(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._entered.pop():
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    @property
    def rounding(self) -> tuple[float, float]:
        """The largest errors that rounding explains: of a sum, relative to its terms, and of a gradient."""
        if self._has_levels:
            return _ROUNDING_OF_LEVELS
        return max((_ROUNDING.get(dtype, _ROUNDING_OF_SINGLE) for dtype in self.dtypes), default=_ROUNDING_OF_SINGLE)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._num_calls += 1
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        self._has_levels = self._has_levels or name in _LEVELS
        if name in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs.update({} if len(args) > 4 else {"dropout_p": 0.0})
        elif func is F.multi_head_attention_forward:
            kwargs["training"] = False
        returned = func(*args, **kwargs)
        if isinstance(returned, torch.Tensor):
            self.dtypes.add(returned.dtype)
            if (drawn := _DRAWN.get(name)) is not None:
                returned = _with_values(returned, drawn(returned, args, kwargs))
        return returned


_DROPOUTS = {
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "feature_dropout",
}  # fmt: skip


def _with_values(drawn: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return drawn.copy_(values.expand(drawn.shape))


def _even(like: torch.Tensor) -> torch.Tensor:
    """Return numbers spread over (0, 1) along the last dimension, alike in each row; halves where there is but one."""
    if like.dim() < 2:
        return torch.full(like.shape, 0.5, dtype=torch.float64, device=like.device)
    place = torch.arange(1, like.shape[-1] + 1, dtype=torch.float64).mul(_GOLDEN).remainder(1)
    return place.to(torch.float32).to(like.device)


def _argument(args: Any, kwargs: Any, place: int, name: str, default: Any) -> Any:
    return kwargs.get(name, args[place] if len(args) > place else default)


def _mean_of_uniform(drawn: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
    low, high = _argument(args, kwargs, 1, "from", 0.0), _argument(args, kwargs, 2, "to", 1.0)
    return torch.full_like(drawn, (low + high) / 2)


def _mean_of_normal(drawn: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
    return torch.full_like(drawn, _argument(args, kwargs, 1, "mean", 0.0))


def _whole(drawn: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
    """Return whole numbers from ``low`` up to, and without, ``high``: ``randint`` takes both, or the second alone."""
    bounds = [each for each in args if isinstance(each, int)]
    low, high = (bounds if len(bounds) > 1 else [0, *bounds, 1])[:2]
    low, high = kwargs.get("low", low), kwargs.get("high", high)
    whole: torch.Tensor = (low + (high - low) * _even(drawn)).floor()
    return whole


_DRAWN: dict[str, Callable[[torch.Tensor, Any, Any], torch.Tensor]] = {
    "rand": lambda drawn, args, kwargs: _even(drawn),
    "rand_like": lambda drawn, args, kwargs: _even(drawn),
    "uniform_": _mean_of_uniform,
    "randn": lambda drawn, args, kwargs: torch.zeros_like(drawn),
    "randn_like": lambda drawn, args, kwargs: torch.zeros_like(drawn),
    "normal_": _mean_of_normal,
    "bernoulli": lambda drawn, args, kwargs: _even(drawn) < args[0],
    "bernoulli_": lambda drawn, args, kwargs: _even(drawn) < _argument(args, kwargs, 1, "p", 0.5),
    "randint": _whole,
    "randint_like": lambda drawn, args, kwargs: _whole(drawn, args[1:], kwargs),
    "randperm": lambda drawn, args, kwargs: torch.arange(len(drawn) - 1, -1, -1, device=drawn.device),
}
"""Functions that draw, by name: (the drawn tensor, args, kwargs) -> the values that replace what was drawn."""


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
        found = [0.0]
        for groups, union in self.runs:
            of_groups = list(map(sums, groups))
            found += [error_of_sum(parts, whole) for *parts, whole in zip(*of_groups, sums(union), strict=True)]
        return max(found)


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
        for draws_anew in (False, False, True):
            if not draws_anew:
                random_state.put_back()
            again.append(without_gradients(run, together))
    first, second, drawn = (float(torch.as_tensor(each[0])) for each in again)
    return Losses(
        runs, mode.rounding[0], are_drawn=first == second != drawn,
        change=error_of_sum([first], second),
    )  # fmt: skip


def without_gradients(run: Callable[[list[Sample]], T], samples: list[Sample]) -> T:
    """Run a forward that keeps no activations, unless the loss takes gradients itself, such as a penalty on them."""
    try:
        with torch.no_grad():
            return run(samples)
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
    return run(samples)


@contextlib.contextmanager
def perturbed(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Change what is trained of ``parameters`` by some percent inside: the first numbers of each tensor."""
    generator = torch.Generator().manual_seed(0)
    saved: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        with torch.no_grad():
            for parameter in parameters:
                if not parameter.requires_grad or not parameter.is_floating_point():
                    continue
                for part in plain_parts(parameter):
                    first = _first_of(part)
                    saved.append((first, first.clone()))
                    scale = float(first.float().square().mean().sqrt()) if first.numel() else 0.0
                    noise = torch.randn(first.shape, generator=generator)
                    first += (noise * 0.1 * (scale or 0.1)).to(first.device, first.dtype)
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


class GradientSketch:
    """Some numbers of each gradient, which take little memory, and the norm of all of it: enough to tell two apart."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._firsts: list[torch.Tensor] = []
        self._norms: list[float] = []
        for parameter in parameters:
            if parameter.requires_grad:
                # No gradient counts as zeros: what no sample of a part has used may be used by others.
                parts = plain_parts(parameter if parameter.grad is None else parameter.grad)
                share = 0 if parameter.grad is None else 1
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
        distance = max(of_firsts, math.sqrt(math.fsum(each**2 for each in of_norms)))
        return distance if math.isfinite(distance) else math.inf


def gradient_error(
    parameters: Sequence[nn.Parameter],
    together: Callable[[], bool],
    apart: Callable[[], bool],
    start_over: Callable[[], None],
) -> tuple[float, float] | None:
    """Return the error of the gradient of parts that ran ``apart``, and the error that rounding explains.

    Both leave gradients in ``parameters``, and return False if memory has run out. Then nothing is known, as with a
    gradient that is not finite, and the result is None.
    """
    sketches = []
    with WithoutChance() as mode, torch.compiler.set_stance("force_eager"):
        for run in (together, apart):
            start_over()
            if not run():
                return None
            sketches.append(GradientSketch(parameters))
    expected, found = sketches
    scale = max(expected.norm, found.norm)
    if not math.isfinite(scale):
        return None
    return (expected.distance(found) / scale if scale else 0.0), mode.rounding[1]
