"""A mode in which torch draws no random numbers, so that samples meet the same ones in any batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

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
    """Draw no random numbers in torch's functions inside: what they return depends on the last dimension alone.

    So a sample meets the same numbers in any batch. Dropout leaves everything as it is, and uniform noise is its mean.
    Normal noise is not, so that what is added in each part of a batch is found out, as to a gradient; nor is a
    permutation, which reverses, for samples that are mixed with each other.

    :attr:`dtypes` are those of what functions have returned, which tell what rounding can do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()
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
        if name in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs.update({} if len(args) > 4 else {"dropout_p": 0.0})
        elif func is F.multi_head_attention_forward:
            kwargs["training"] = False
        elif name in _TRAINING_IS_FOURTH:
            args, kwargs = args[:3], {**_named(args[4:], "inplace"), **kwargs, "training": False}
        elif name == "gumbel_softmax":
            return _gumbel_softmax(*args, **kwargs)
        elif "fractional_max_pool" in name and kwargs.get("_random_samples") is None:
            kwargs["_random_samples"] = _middle_of_windows(args[0] if args else kwargs["input"], name)
        returned = func(*args, **kwargs)
        if isinstance(returned, torch.Tensor):
            self.dtypes.add(returned.dtype)
            if (drawn := _DRAWN.get(name)) is not None and self._num_draws < _MOST_DRAWS:
                self._num_draws += 1
                returned = _with_values(returned, drawn(returned, args, kwargs))
        return returned


_DROPOUTS = {
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "feature_dropout",
    "dropout_", "alpha_dropout_", "feature_alpha_dropout_", "feature_dropout_",
}  # fmt: skip


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


def _exponential(drawn: torch.Tensor, rate: Any = 1.0) -> torch.Tensor:
    numbers: torch.Tensor = -torch.log1p(-_even(drawn)) / rate
    return numbers


def _gamma(shape: torch.Tensor) -> torch.Tensor:
    """Return numbers about as those of a gamma distribution, by the approximation of Wilson and Hilferty."""
    root = 1 - 1 / (9 * shape) + _standard(shape) / (3 * shape.sqrt())
    numbers: torch.Tensor = shape * root.clamp(min=1e-2) ** 3
    return numbers


def _drawn_places(drawn: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
    """Return the places in a row of weights that each number of :func:`_even` falls on, or as many unlike ones."""
    weights = (args[0] if args else kwargs["input"]).detach().float()
    shares = weights / weights.sum(-1, keepdim=True)
    if _argument(args, kwargs, 2, "replacement", False):
        reached = shares.cumsum(-1).contiguous()
        places: torch.Tensor = torch.searchsorted(reached, _even(drawn).expand(drawn.shape).contiguous())
        return places.clamp(max=shares.shape[-1] - 1)
    if shares.dim() == 1:  # which may be a choice of samples
        return torch.arange(len(shares) - 1, -1, -1, device=drawn.device)[: len(drawn)]
    noise = _exponential(shares)
    order: torch.Tensor = (shares.log() - noise.log()).topk(drawn.shape[-1], dim=-1).indices
    return order


def _gumbel_softmax(
    logits: torch.Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> torch.Tensor:
    """Compute what torch's function does, which draws where no mode sees it."""
    soft = ((logits - _exponential(logits).log()) / tau).softmax(dim)
    if not hard:
        return soft
    one_hot = torch.zeros_like(soft).scatter_(dim, soft.argmax(dim, keepdim=True), 1.0)
    return one_hot - soft.detach() + soft


def _middle_of_windows(pooled: torch.Tensor, name: str) -> torch.Tensor:
    dimensions = 3 if "3d" in name else 2
    batch = pooled.shape[0] if pooled.dim() == dimensions + 2 else 1
    return pooled.new_full((batch, pooled.shape[-dimensions - 1], dimensions), 0.5)


def _named(values: Sequence[Any], *names: str) -> dict[str, Any]:
    return dict(zip(names, values, strict=False))


_TRAINING_IS_FOURTH = {"rrelu", "rrelu_"}


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
    "log_normal_": lambda drawn, args, kwargs: _of_normal(drawn, args, kwargs).exp(),
    "exponential_": lambda drawn, args, kwargs: _exponential(drawn, _argument(args, kwargs, 1, "lambd", 1.0)),
    "geometric_": lambda drawn, args, kwargs: (
        (_exponential(drawn) / -math.log1p(-_argument(args, kwargs, 1, "p", 0.5))).ceil().clamp(min=1)
    ),
    "cauchy_": lambda drawn, args, kwargs: (
        torch.tan(math.pi * (_even(drawn) - 0.5)) * _argument(args, kwargs, 2, "sigma", 1.0)
        + _argument(args, kwargs, 1, "median", 0.0)
    ),
    "random_": lambda drawn, args, kwargs: _whole(drawn, args[1:], kwargs),
    "poisson": lambda drawn, args, kwargs: (args[0].detach() + _even(drawn)).floor(),
    "binomial": lambda drawn, args, kwargs: (args[0] * args[1] + _even(drawn)).floor().clamp(max=args[0]),
    "multinomial": _drawn_places,
    "_standard_gamma": lambda drawn, args, kwargs: _gamma(args[0].detach()),
    "_sample_dirichlet": lambda drawn, args, kwargs: (
        _gamma(args[0].detach()) / _gamma(args[0].detach()).sum(-1, keepdim=True)
    ),
    "bernoulli": lambda drawn, args, kwargs: _even(drawn) < _argument(args, kwargs, 1, "p", args[0]),
    "bernoulli_": lambda drawn, args, kwargs: _even(drawn) < _argument(args, kwargs, 1, "p", 0.5),
    "randint": _whole,
    "randint_like": lambda drawn, args, kwargs: _whole(drawn, args[1:], kwargs),
    "randperm": lambda drawn, args, kwargs: torch.arange(len(drawn) - 1, -1, -1, device=drawn.device),
}
"""Functions that draw, by name: (the drawn tensor, args, kwargs) -> the values that replace what was drawn."""
