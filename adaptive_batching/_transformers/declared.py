"""What of a trainer is declared to change in a step, so that it is put back where samples run again or for a check."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from adaptive_batching._state import State

if TYPE_CHECKING:
    from adaptive_batching._transformers.trl_metrics import TrlMetrics


def state_of(trainer: Any) -> State:
    """Return the state of ``trainer``: its models, numbers and small tensors, what TRL counts, and what is listed."""
    run, metrics = getattr(trainer, "adaptive", None), trl_metrics_of(trainer)
    return State(
        losses={"compute_loss_func": trainer.compute_loss_func},
        draws=[trainer.data_collator],
        trainer=trainer,
        listed=[*([] if metrics is None else [metrics]), *([] if run is None else run.listed)],
        how_to_declare=(
            "pass the objects that hold them to adopt(trainer, ..., state=[...]), with state_dict and load_state_dict, "
            "or keep the values in buffers of a module"
        ),
    )


def trl_metrics_of(trainer: Any) -> TrlMetrics | None:
    """Return the metrics of a trainer of TRL; None for others, whatever attributes they have."""
    if not any(class_.__module__.partition(".")[0] == "trl" for class_ in type(trainer).__mro__):
        return None
    from adaptive_batching._transformers.trl_metrics import TrlMetrics

    return TrlMetrics(trainer)
