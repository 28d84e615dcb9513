"""The increase functions of this package; see :mod:`adaptive_batching._growth.increase` for their signature.

The functions below are factories that return an increase function. Sizes are those of a batch on one device. A schedule
counts from the size at the start of the run, not from the current one, so that clipping at the maximum does not
compound and a resumed run continues where it was. None of them shrinks a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from adaptive_batching._growth.increase import GrowthState, IncreaseFunction, planned

__all__ = [
    "constant", "cosine", "fixed_increase", "late_switch", "linear", "multistep", "on_plateau", "polynomial",
    "replace_lr_decay", "staged", "step",
]  # fmt: skip

_ROUNDING = 1e-9  # 2 ** 3 computed from a third of an epoch may come out as 7.999999999999998


def constant() -> IncreaseFunction:
    """Keep the batch size constant."""
    return lambda epoch, current_batch_size: 0


def fixed_increase(increase: int, epochs: list[int] | None = None) -> IncreaseFunction:
    """Add ``increase`` samples at the start of each of ``epochs``; None for every epoch but the first.

    Raises:
        ValueError: If ``increase`` or an epoch is negative.
    """
    _require("increase", increase, at_least=0, whole=True)
    for epoch in epochs or []:
        _require("epochs", epoch, at_least=0, whole=True)

    def increase_at(epoch: float, current_batch_size: int) -> int:
        due = epoch > 0 and epoch == int(epoch) if epochs is None else epoch in epochs
        return increase if due else 0

    return increase_at


def step(every: float = 1, gamma: float = 2.0) -> IncreaseFunction:
    """Grow as ``initial * gamma ** floor(epoch / every)``, the mirror image of a stepwise learning-rate decay.

    Smith et al. 2017, "Don't Decay the Learning Rate, Increase the Batch Size" (arXiv:1711.00489).
    """
    _require("every", every, above=0)
    _require("gamma", gamma, above=1)
    return _schedule(lambda s: _times(s, gamma, math.floor(s.epoch / every + _ROUNDING)))


def multistep(milestones: Sequence[float], gamma: float = 2.0) -> IncreaseFunction:
    """Grow as ``initial * gamma ** (number of milestones reached)``, with ``milestones`` in epochs."""
    _require("gamma", gamma, above=1)
    if isinstance(milestones, str) or not isinstance(milestones, Sequence):
        raise ValueError(f"milestones={milestones!r} must be a list of epochs")
    for milestone in milestones:
        _require("milestones", milestone, at_least=0)
    return _schedule(lambda s: _times(s, gamma, sum(s.epoch >= m - _ROUNDING for m in milestones)))


def staged(stages: Mapping[Any, int]) -> IncreaseFunction:
    """Use the size of the last stage reached in ``{epoch: size}``, such as ``{0: 4, 1: 8, 2.5: 16}``."""
    if not isinstance(stages, Mapping) or not stages:
        raise ValueError(f"stages={stages!r} must be a mapping of epochs to sizes, such as {{0: 4, 2: 8}}")
    by_epoch: list[tuple[float, int]] = []
    for epoch, size in stages.items():
        try:
            by_epoch.append((float(epoch), size))
        except (TypeError, ValueError):
            raise ValueError(f"stages={dict(stages)!r} has a key that is not an epoch: {epoch!r}") from None
        _require("stages", size, at_least=1, whole=True)
    by_epoch.sort()

    def size_at(state: GrowthState) -> float:
        reached = [size for epoch, size in by_epoch if state.epoch >= epoch - _ROUNDING]
        return reached[-1] if reached else state.initial_batch_size

    return _schedule(size_at)


def polynomial(end: int | None = None, ramp_epochs: float | None = None, power: float = 1.0) -> IncreaseFunction:
    """Grow as ``initial + (end - initial) * min(1, epoch / ramp_epochs) ** power``.

    Args:
        end: Size at the end of the ramp; None for the maximum.
        ramp_epochs: Length of the ramp in epochs; None for the whole run.
        power: Exponent; below 1 the batch grows early, above 1 late.
    """
    _require("power", power, above=0)
    return _ramp(lambda s: _progress(s, ramp_epochs) ** power, end, ramp_epochs)


def linear(end: int | None = None, ramp_epochs: float | None = None) -> IncreaseFunction:
    """Grow as ``initial + (end - initial) * min(1, epoch / ramp_epochs)``; see :func:`polynomial`."""
    return polynomial(end, ramp_epochs)


def cosine(end: int | None = None, ramp_epochs: float | None = None) -> IncreaseFunction:
    """Grow as ``end - (end - initial) * (1 + cos(pi * min(1, epoch / ramp_epochs))) / 2``; see :func:`polynomial`."""
    return _ramp(lambda s: (1 - math.cos(math.pi * _progress(s, ramp_epochs))) / 2, end, ramp_epochs)


def late_switch(fraction: float, end: int | None = None) -> IncreaseFunction:
    """Keep ``initial`` for ``fraction`` of the run, then use ``end`` (None for the maximum)."""
    _require("fraction", fraction, above=0)
    if fraction >= 1:
        raise ValueError(f"fraction={fraction!r} must be below 1, the whole run")
    return _ramp(lambda s: float(s.epoch >= fraction * s.total_epochs - _ROUNDING), end)


def replace_lr_decay(alpha: float = 2.0) -> IncreaseFunction:
    """Multiply by ``alpha`` whenever the scheduled learning rate has fallen by another factor of ``alpha``.

    Use this with ``lr_scaling``, which undoes the decay. With ``linear``, the rate stays near its peak while the batch
    can grow: Smith et al. 2017 (arXiv:1711.00489), for SGD. With ``sqrt``, the rate falls by ``sqrt(alpha)`` instead of
    ``alpha``: Seesaw 2025 (arXiv:2510.14717), for Adam. The schedule keeps falling between two decisions, where these
    papers have steps. Beyond ``max_lr_scale`` the decay is not undone.
    """
    _require("alpha", alpha, above=1)

    def size_at(state: GrowthState) -> float:
        if state.lr_decay <= 0:
            return state.maximum
        return _times(state, alpha, math.floor(-math.log(state.lr_decay, alpha) + _ROUNDING))

    return _schedule(size_at)


def on_plateau(
    patience: int = 2, rate: float = 2.0, min_delta: float = 1e-3, cooldown: int = 0, metric: str = "loss"
) -> IncreaseFunction:
    """Multiply by ``rate`` when the loss has stopped falling: ``ReduceLROnPlateau`` for the batch size.

    Args:
        patience: Decisions in a row without a better loss after which the batch grows.
        rate: Factor by which the batch grows.
        min_delta: Fraction of the best loss by which a loss must fall below it to count as better.
        cooldown: Decisions after the batch has grown that do not count towards ``patience``.
        metric: ``"loss"``, the mean training loss since the last decision; or ``"val_loss"``, that of the last
            validation, where decisions without one since the last decision do not count at all.
    """
    _require("patience", patience, at_least=1, whole=True)
    _require("cooldown", cooldown, at_least=0, whole=True)
    _require("rate", rate, above=1)
    _require("min_delta", min_delta, at_least=0)
    if metric not in ("loss", "val_loss"):
        raise ValueError(f"metric={metric!r} must be loss or val_loss")

    def size_at(state: GrowthState) -> float:
        # Recomputed from all losses each time, so that there is nothing to store.
        best, bad, pause, times = math.inf, 0, 0, 0
        for loss in state.val_losses if metric == "val_loss" else state.losses:
            if loss < best * (1 - min_delta):
                best, bad = loss, 0
            elif pause == 0:
                bad += 1
            pause = max(pause - 1, 0)
            if bad >= patience:
                bad, pause, times = 0, cooldown, times + 1
        return _times(state, rate, times)

    increase = _schedule(size_at, early=False)
    increase.reads_val_loss = metric == "val_loss"  # type: ignore[attr-defined]
    return increase


def _schedule(size_at: Callable[[GrowthState], float], *, early: bool = True) -> IncreaseFunction:
    """Return the increase function that follows ``size_at``, a size as a function of the state."""

    def increase(epoch: float, current_batch_size: int, state: GrowthState) -> int:
        size = min(size_at(state), float(state.maximum))  # caps an infinite size, too
        return max(math.floor(size + _ROUNDING) - current_batch_size, 0)

    increase.__qualname__ = size_at.__qualname__  # names the factory that made it
    return planned(increase) if early else increase


def _times(state: GrowthState, factor: float, power: int) -> float:
    # The maximum bounds every size anyway. Without a bound on the power, many epochs would overflow a float.
    return state.initial_batch_size * factor ** min(power, math.ceil(math.log(state.maximum, factor)) + 1)


def _progress(state: GrowthState, ramp_epochs: float | None) -> float:
    return min(1.0, state.epoch / (ramp_epochs or state.total_epochs))


def _ramp(
    progress: Callable[[GrowthState], float], end: int | None, ramp_epochs: float | None = None
) -> IncreaseFunction:
    """Return the increase function that goes from the initial size to ``end`` as ``progress`` goes from 0 to 1."""
    if end is not None:
        _require("end", end, at_least=1, whole=True)
    if ramp_epochs is not None:
        _require("ramp_epochs", ramp_epochs, above=0)

    def size_at(state: GrowthState) -> float:
        last = state.maximum if end is None else end
        return state.initial_batch_size + (last - state.initial_batch_size) * progress(state)

    size_at.__qualname__ = progress.__qualname__
    return _schedule(size_at)


def _require(
    name: str, value: Any, *, above: float = -math.inf, at_least: float = -math.inf, whole: bool = False
) -> None:
    is_number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not is_number or not at_least <= value < math.inf or value <= above:
        bound = f"of at least {at_least:g}" if above == -math.inf else f"above {above:g}"
        raise ValueError(f"{name}={value!r} must be a {'whole ' if whole else ''}number {bound}")
