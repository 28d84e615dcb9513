"""Do parts of a batch add up to it? Batch norms by name, and all else by the gradient that both leave.

Meanwhile common random numbers do not depend on the batch that they are drawn for (:class:`WithoutChance`), so that
dropout makes no difference. A difference that others explain proves nothing, and a warning says what draws.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from adaptive_batching._memory.out_of_memory import is_out_of_memory
from adaptive_batching._ranks.agree import ALONE, Ranks
from adaptive_batching._state import rehearsal
from adaptive_batching._step.work import Work
from adaptive_batching._tensors import hash_of, plain_parts
from adaptive_batching._undeclared import reporting
from adaptive_batching._values import DRY_RUN, ConfigError, percent

log = logging.getLogger(__name__)

_PARTS = 16  # of a step, of which two samples are chosen
_TIMES = 4  # as long as the other one of them should be
_FIRST = 2**16  # numbers of each tensor that are changed, or compared
_TIMES_CHANCE = 5  # what other random numbers change, for the error that they explain
_TIMES_ROUNDING = 3  # what rounding in the last place of weights changes, for that of all that is computed from them

RunParts = Callable[[Sequence[list[Any]]], float | None]
"""Runs forward and backward of parts, weighted as those of one batch, leaves their gradient and returns the number of
their losses, as :meth:`Work.number` gives it; None if memory runs out on any rank."""


def find_batch_norm(model: nn.Module) -> str | None:
    """Name the first batch normalisation that takes its statistics from the batch, also if no batch may reach it."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None):
            return f"{name or 'model'} ({type(module).__name__})"
    return None


class GradientsDifferError(ConfigError):
    """Raised if gradients of parts do not add up to that of their union, from which they are ``error`` off."""

    def __init__(self, message: str, error: float) -> None:
        super().__init__(message)
        self.error = error


class Audit:
    """Compares the gradient of two parts with that of their union, on all ranks together.

    The first comparison also reports what the samples change that nobody puts back. If random numbers that
    :class:`WithoutChance` does not replace explain a difference, it proves nothing: the first time, a warning says so.

    It looks at the first step that is split, and then at the 10th, the 100th and so on, or at every ``every``-th. Two
    or three samples run, of unlike lengths, and short ones of these, so that it costs a small part of these steps.
    Where a step has none of unlike lengths, like ones show less, as nothing is padded: these are counted by themselves,
    and the first step that has unlike ones is looked at as well.

    Args:
        work: That runs parts, and has a ``state``.
        ranks: That train together.
        remedy: What to do if gradients differ, in words.
        every: Steps from one look to the next; None for powers of ten.
    """

    def __init__(self, work: Work[Any, Any, Any], ranks: Ranks, remedy: str, every: int | None = None) -> None:
        assert work.state is not None
        self._work, self._state, self._ranks = work, work.state, ranks
        self._remedy, self._every = remedy, every
        self._has_warned = False
        self._step = self._up_to = 1  # the one that is looked at, and the latest that may be due
        self._next = self._next_alike = 1  # the second where a step has only samples of one length

    def is_due(self, step: int, *, again: bool) -> bool:
        """Return True if parts of a step, from 1 on, are to be compared, if they can be.

        Those that run ``again`` are compared only if none have been before.
        """
        self._step, self._up_to = step, 1 if again else step
        return min(self._next, self._next_alike) <= self._up_to and DRY_RUN not in os.environ  # where all values are 0

    def look(self, parts: Sequence[list[Any]], run: RunParts) -> None:
        """Compare parts of the step that :meth:`is_due` was asked of.

        On a rank that has but one part, where others have more, a filler runs.

        Raises:
            ConfigError: If gradients of parts do not add up to that of their union.
        """
        is_due, is_due_alike = self._next <= self._up_to, self._next_alike <= self._up_to
        chosen: tuple[list[Any], list[Any]] | None = None
        if len(parts) > 1 and (is_due_alike or self._are_unlike([each for part in parts[:_PARTS] for each in part])):
            chosen = _of_unlike_lengths(parts, self._work)
        elif len(parts) <= 1:
            chosen = [*self._work.filler().samples], [*self._work.filler().samples]
        unlike = chosen is not None and self._are_unlike([*chosen[0], *chosen[1]])
        of_ranks = self._ranks.gather((len(parts) > 1, chosen is not None, unlike))
        split, has_some, unlikes = zip(*of_ranks, strict=True)
        if not any(split) or not all(has_some) or not (is_due if any(unlikes) else is_due_alike):
            return
        assert chosen is not None
        if self.compare(*chosen, run):
            self._next_alike = self._after(self._next_alike)
            if any(unlikes):
                self._next = self._next_alike = self._after(self._next)

    def _after(self, due: int) -> int:
        """Return the step to look at after this one, in which one was ``due``."""
        if self._every is not None:
            return self._step + self._every
        while due <= self._step:
            due *= 10
        return due

    def _are_unlike(self, samples: Sequence[Any]) -> bool:
        return len(set(map(self._work.extent, samples))) > 1

    def compare(self, one: list[Any], other: list[Any], run: RunParts) -> bool:
        """Compare two parts, whenever that is, and leave nothing behind; return True if that was possible.

        Raises:
            ConfigError: As for :meth:`look`.
        """
        parameters, numbers, draws = self._work.parameters(), list[float](), set[str]()

        def noted(lists: Sequence[list[Any]]) -> bool:
            if (number := run(lists)) is not None:
                numbers.append(number)
            return number is not None

        together, apart = partial(noted, [[*one, *other]]), partial(noted, [one, other])
        with reporting(self._state), rehearsal(self._state, parameters[0].device, parameters) as start_over:

            def measured(first: Callable[[], bool], second: Callable[[], bool]) -> tuple[float, float] | None:
                compared = gradient_error(parameters, first, second, start_over, self._ranks)
                if compared is None:
                    return None
                error, rounding, drawn = compared
                draws.update(drawn)
                return self._ranks.largest(error), self._ranks.largest(rounding)

            def with_rounded_weights() -> bool:
                with perturbed(parameters, in_last_place=True):
                    return together()

            def with_other_numbers() -> bool:
                for device in {torch.device("cpu"), parameters[0].device}:
                    torch.rand(1, device=device)  # so that what comes next is drawn from another place
                return together()

            if (compared := measured(together, apart)) is None:
                return False
            error, rounding = compared
            if rounding < error < math.inf:
                if (again := measured(together, together)) is None:
                    return False
                repeats = again[0] <= rounding  # else it draws numbers of its own, and nothing below tells anything
            if rounding < error < math.inf and repeats:
                # Where terms of a gradient nearly cancel, rounding is large against what is left of them. It is
                # another where samples come in another order, and where weights are rounded otherwise.
                in_another_order = measured(partial(noted, [[*other, *one]]), apart)
                of_rounding = measured(together, with_rounded_weights)
                if in_another_order is None or of_rounding is None:
                    return False
                error = min(error, in_another_order[0])
                rounding = max(rounding, _TIMES_ROUNDING * of_rounding[0])
            is_chance = False
            if rounding < error < math.inf and repeats and any(of_ranks := self._ranks.gather(draws)):
                if (by_chance := measured(together, with_other_numbers)) is None:
                    return False
                # Else a little noise of the model's own would hide an error many times its size.
                is_chance = by_chance[0] > max(rounding, error / _TIMES_CHANCE)
                if is_chance:
                    self._warn_of(set[str]().union(*of_ranks))
        if error == math.inf:
            raise ConfigError(
                "a backward pass changes what is trained or takes the gradients away, as a hook of "
                "register_post_accumulate_grad_hook does that steps an optimizer, so that each part of a batch would "
                "be a step of its own; step the optimizer after the backward pass, or train without adaptive batching"
            )
        if error > rounding and not is_chance:
            raise GradientsDifferError(
                f"the gradient of a batch in two parts is {percent(error)} off that of the same batch in one (in step "
                f"{self._step}), so that training in parts would go wrong. The loss or the model uses statistics of "
                "the whole batch (in-batch negatives, a router's auxiliary loss) or reads padding, has a scale or "
                f"random numbers of its own, or a forward pass changes it; {self._remedy}",
                error,
            )
        of_whole, of_parts = numbers[:2]
        if self._ranks.any(error_of_sum([of_parts], of_whole) > rounding):
            raise ConfigError(
                f"loss returns {of_parts:g} as the number of losses of a batch in two parts, and {of_whole:g} for the "
                f"same batch in one, so that training in parts would go wrong: it counts padding, say; {self._remedy}"
            )
        return True

    def _warn_of(self, draws: Iterable[str]) -> None:
        if not self._has_warned:
            log.warning(
                "parts of a batch cannot be compared with the whole, because random numbers are drawn (by %s); a loss "
                "or a model that uses statistics of the whole batch (in-batch negatives, a router's auxiliary loss) "
                "would go unnoticed", ", ".join(sorted(draws)),
            )  # fmt: skip
        self._has_warned = True


def _of_unlike_lengths(parts: Sequence[list[Any]], work: Work[Any, Any, Any]) -> tuple[list[Any], list[Any]] | None:
    """Return a sample of one part and one or two of another, which fit together in one.

    They are of unlike lengths as far as possible up to ``_TIMES``, and otherwise have few tokens.
    """
    tokens, most = work.tokens_in_one, max(*map(work.tokens, parts), work.limit.max_tokens or 0)
    by_length = [sorted(part, key=lambda sample: (tokens([sample]), work.extent(sample))) for part in parts[:_PARTS]]
    candidates = []
    for one, other in itertools.permutations(by_length, 2):
        enough = _TIMES * tokens(other[:1])
        longer = next((sample for sample in one if tokens([sample]) >= enough), one[-1])
        times = tokens([longer]) / max(tokens(other[:1]), 1)
        alike = work.extent(longer) == work.extent(other[0])
        for shorter in (other[:2], other[:1]):
            if (together := tokens([longer, *shorter])) <= most:
                candidates.append((alike, -min(times, _TIMES), -len(shorter), together, [longer], shorter))
    if not candidates:
        return None
    *_, chosen_one, chosen_other = min(candidates, key=lambda candidate: candidate[:4])
    return chosen_one, chosen_other


def error_of_sum(parts: Iterable[float], whole: float) -> float:
    """Return how far ``whole`` is from the sum of ``parts``, relative to what they are made of; inf if one is NaN."""
    parts = list(parts)
    error = abs(math.fsum(parts) - whole) / max(abs(whole), math.fsum(map(abs, parts)), 1e-30)
    return error if math.isfinite(error) else math.inf


def gradient_error(
    parameters: Sequence[nn.Parameter],
    together: Callable[[], bool],
    apart: Callable[[], bool],
    start_over: Callable[[], None],
    ranks: Ranks = ALONE,
) -> tuple[float, float, set[str]] | None:
    """Return the error of the gradient of parts that ran ``apart``, the error that rounding explains, and what drew.

    The last are the :attr:`WithoutChance.draws` of this rank, which may explain an error, too.

    Both leave gradients in ``parameters``, and return False if memory has run out, which all ``ranks`` know. Then
    nothing is known, as with a gradient that is not finite on a rank, and the result is None on all. The error is inf
    if a run changes what is trained, or if hooks take gradients away, as those of an optimizer that steps within
    backward.
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
            changes = any(taken) or list(map(hash_of, trained)) != before
            sketch = None if changes else _sketched(parameters)
            # Ranks go on together: the next run may have collectives.
            worst = ranks.largest(2 if changes else 1 if sketch is None else 0)
            if worst:
                return (math.inf, mode.rounding[1], mode.draws) if worst == 2 else None
            assert sketch is not None
            sketches.append(sketch)
    expected, actual = sketches
    scale = max(expected.norm, actual.norm)
    if not ranks.all(math.isfinite(scale)):
        return None
    # Finite gradients are at most 2 apart; one that is not finite in a part alone is as wrong.
    return (min(expected.distance(actual) / scale, 2.0) if scale else 0.0), mode.rounding[1], mode.draws


def _sketched(parameters: Sequence[nn.Parameter]) -> GradientSketch | None:
    """Return a sketch of the gradients; None if memory runs out."""
    try:
        return GradientSketch(parameters)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    return None


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
                    self._norms.append(_norm(gradient.values()))
                    continue
                parts = plain_parts(parameter if parameter.grad is None else parameter.grad)
                self._firsts += [share * _first_of(part).to("cpu", torch.float32, copy=True) for part in parts]
                self._norms += [share * _norm(part) for part in parts]

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


def _norm(tensor: torch.Tensor) -> float:
    """Return the L2 norm, in single precision at least; of half precision without a copy in single."""
    if tensor.dtype in (torch.float16, torch.bfloat16):
        return float(torch.linalg.vector_norm(tensor, dtype=torch.float32))
    return float((tensor if tensor.is_floating_point() else tensor.float()).norm())


@functools.cache
def _noise() -> torch.Tensor:
    """Return numbers of a normal distribution, drawn by Python, as :class:`WithoutChance` replaces those of torch."""
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


# Random numbers

# Errors that rounding explains, of a sum of losses relative to its terms, and of a gradient. TF32 rounds what goes in,
# which is the same in any batch.
_ROUNDING = {torch.bfloat16: (2e-2, 1e-1), torch.float16: (5e-3, 3e-2)}
_ROUNDING_OF_SINGLE = (1e-4, 1e-4)
# Of a model that rounds itself, as if it were quantized: rounding may send a number to the next level.
_ROUNDING_OF_LEVELS = (2e-2, 1e-1)
_LEVELS = {"round", "round_", "fake_quantize_per_tensor_affine", "fake_quantize_per_channel_affine"}
_MOST_DRAWS = 1_000  # in a module; what draws until a number is as it wants it would never end
_GOLDEN = (math.sqrt(5) - 1) / 2


class WithoutChance(TorchFunctionMode):
    """Replace what torch's common random functions draw inside by numbers that depend on the last dimension alone.

    So a sample meets the same numbers in any batch. Dropout leaves everything as it is, and uniform noise becomes its
    mean. Normal noise becomes a fixed pattern, not zero, so that noise added once per part is noticed. ``randperm``
    returns the reverse order, so that mixing samples is noticed.

    :attr:`dtypes` are those of what functions have returned, which tell what rounding can do. :attr:`draws` are the
    names of other functions that have drawn, as the state of torch's generators tells.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()
        self.draws: set[str] = set()
        self._has_levels = False
        self._num_calls = 0
        self._num_draws = 0  # since a module has begun to run
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
        self._num_draws = 0
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
        if isinstance(kwargs.get("generator"), torch.Generator):  # of the user's own, which nobody would put back
            del kwargs["generator"]
        if name in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs.update({} if len(args) > 4 else {"dropout_p": 0.0})
        elif func is F.multi_head_attention_forward:
            kwargs["training"] = False
        before = _generators()
        returned = func(*args, **kwargs)
        if isinstance(returned, torch.Tensor):
            self.dtypes.add(returned.dtype)
            if (drawn := _DRAWN.get(name)) is not None and self._num_draws < _MOST_DRAWS:
                self._num_draws += 1
                return _with_values(returned, drawn(returned, args, kwargs))
        if func not in _ATTENTIONS and _have_moved(before):
            self.draws.add(name)
        return returned


def _generators() -> tuple[torch.Tensor, list[int]]:
    """Return the state of torch's generator on the CPU, and how far those of CUDA are, which it does not initialize."""
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    on_cuda = torch.cuda.default_generators if in_use else ()
    return torch.default_generator.get_state(), [generator.get_offset() for generator in on_cuda]


def _have_moved(before: tuple[torch.Tensor, list[int]]) -> bool:
    on_cpu, on_cuda = _generators()
    return on_cuda[: len(before[1])] != before[1] or not torch.equal(on_cpu, before[0])


_DROPOUTS = {
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "feature_dropout",
    "dropout_", "alpha_dropout_", "feature_alpha_dropout_", "feature_dropout_",
}  # fmt: skip
# Their dropout is off. A kernel may pass random numbers over all the same.
_ATTENTIONS = (F.scaled_dot_product_attention, F.multi_head_attention_forward)


def _with_values(drawn: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    drawn.data.copy_(values.expand(drawn.shape))  # a backward pass may have saved what was drawn, and takes these
    return drawn


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


def _of_normal(drawn: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
    mean, deviation = (_argument(args, kwargs, at, name, float(at - 1)) for at, name in ((1, "mean"), (2, "std")))
    return _standard(drawn).mul(deviation).add(mean)


def _standard(like: torch.Tensor) -> torch.Tensor:
    """Return numbers of mean 0 and variance 1, as :func:`_even` spreads them."""
    return (_even(like) - 0.5) * math.sqrt(12)


def _whole(drawn: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
    """Return whole numbers from ``low`` up to, and without, ``high``: ``randint`` takes both, or the second alone."""
    bounds = [bound for bound in args if isinstance(bound, int)]
    low, high = (bounds if len(bounds) > 1 else [0, *bounds, 1])[:2]
    low, high = kwargs.get("low", low), kwargs.get("high", high)
    numbers: torch.Tensor = (low + (high - low) * _even(drawn)).floor()
    return numbers


_DRAWN: dict[str, Callable[[torch.Tensor, Any, Any], torch.Tensor]] = {
    "rand": lambda drawn, args, kwargs: _even(drawn),
    "rand_like": lambda drawn, args, kwargs: _even(drawn),
    "uniform_": _mean_of_uniform,
    "randn": lambda drawn, args, kwargs: _standard(drawn),
    "randn_like": lambda drawn, args, kwargs: _standard(drawn),
    "normal_": _of_normal,
    "normal": lambda drawn, args, kwargs: (
        _standard(drawn) * _argument(args, kwargs, 1, "std", 1.0) + _argument(args, kwargs, 0, "mean", 0.0)
    ),
    "exponential_": lambda drawn, args, kwargs: -torch.log1p(-_even(drawn)) / _argument(args, kwargs, 1, "lambd", 1.0),
    "random_": lambda drawn, args, kwargs: _whole(drawn, args[1:], kwargs),
    "bernoulli": lambda drawn, args, kwargs: _even(drawn) < _argument(args, kwargs, 1, "p", args[0]),
    "bernoulli_": lambda drawn, args, kwargs: _even(drawn) < _argument(args, kwargs, 1, "p", 0.5),
    "randint": _whole,
    "randint_like": lambda drawn, args, kwargs: _whole(drawn, args[1:], kwargs),
    "randperm": lambda drawn, args, kwargs: torch.arange(len(drawn) - 1, -1, -1, device=drawn.device),
}
"""Functions that draw, by name: (the drawn tensor, args, kwargs) -> the values that replace what was drawn."""
