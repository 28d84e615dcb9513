"""Batch sizes of a whole run, one for each epoch. Standard library only."""

from __future__ import annotations

from adaptive_batching._growth.controller import BatchController
from adaptive_batching._growth.course import Course
from adaptive_batching._growth.epoch import RunShape
from adaptive_batching._growth.increase import IncreaseFunction, IncreaseFunctionError, check_signature, is_planned


def plan_batch_sizes(
    batch_size: int, increase: IncreaseFunction, *, epochs: int, samples: int, maximum: int | None = None
) -> list[int]:
    """Return the batch size of each epoch, for a loop that makes a data loader for every epoch.

    The function is asked at the start of each epoch, as in a recipe: what it adds is added where the sum stays within
    ``maximum``. The learning rate is taken to be constant, so that ``growth.replace_lr_decay`` keeps the size.

    Args:
        batch_size: Samples of a batch in the first epoch.
        increase: ``(epoch, current_batch_size) -> samples to add``, such as ``growth.step()``.
        epochs: Epochs of the run.
        samples: Samples of an epoch.
        maximum: The largest size, such as one that a probe has found; None for ``samples``.

    Raises:
        ValueError: If a number is below 1, or ``batch_size`` above ``maximum``.
        IncreaseFunctionError: If ``increase`` is a factory that is still to be called, or cannot be called with an
            epoch and a batch size, or reads what is known only while training, such as losses, or returns
            something else than a whole number >= 0.
    """
    maximum = samples if maximum is None else maximum
    for name, value in {"batch_size": batch_size, "epochs": epochs, "samples": samples, "maximum": maximum}.items():
        if not hasattr(value, "__index__") or value < 1:
            raise ValueError(f"{name}={value!r} must be at least 1, a whole number")
    if batch_size > maximum:
        raise ValueError(f"batch_size={batch_size} is above maximum={maximum}; start with less")
    name = getattr(increase, "__qualname__", repr(increase))
    check_signature(f"increase={name}", increase)
    if not is_planned(increase):
        raise IncreaseFunctionError(
            f"{name} reads what is known only while training, and sizes are planned before; use a function of "
            f"(epoch, current_batch_size), or one of adaptive_batching.growth that needs neither losses nor noise"
        )
    controller = BatchController(batch_size, maximum, f"maximum={maximum}", increase, name)
    return [epoch.batch_sizes[0] for epoch in Course(controller, RunShape(epochs, samples)).plan()]
