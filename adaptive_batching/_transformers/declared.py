"""What of a trainer is declared to change in a step, so that it is put back where samples run again or for a check."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adaptive_batching._state import State


def state_of(trainer: Any) -> State:
    """Return the state of ``trainer``: its models, numbers and small tensors, what TRL counts, and what is listed."""
    run = getattr(trainer, "adaptive", None)
    return State(
        losses={"compute_loss_func": trainer.compute_loss_func},
        draws=[trainer.data_collator],
        trainer=trainer,
        listed=[CountedByTrl(trainer), *(() if run is None else run.listed)],
        how_to_declare=(
            "pass the objects that hold them to adopt(trainer, ..., state=[...]), with state_dict and load_state_dict, "
            "or keep the values in buffers of a module"
        ),
    )


def counted_by_trl(trainer: Any) -> dict[str, dict[str, list[float]]]:
    """Return what a trainer of TRL has counted, by mode and name; nothing for others, whatever attributes they have."""
    return trainer._metrics if _is_of_trl(trainer) and hasattr(trainer, "_metrics") else {}


def _is_of_trl(trainer: Any) -> bool:
    return any(class_.__module__.partition(".")[0] == "trl" for class_ in type(trainer).__mro__)


class CountedByTrl:
    """What a trainer of TRL has counted for its logs, as the state of an object."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @property
    def _counted(self) -> list[dict[str, Any]]:
        names = ("_metrics", "_stored_metrics") if _is_of_trl(self._trainer) else ()
        return [getattr(self._trainer, name) for name in names if hasattr(self._trainer, name)]

    def state_dict(self) -> dict[int, Any]:
        return {
            at: {mode: {name: list(values) for name, values in of_mode.items()} for mode, of_mode in counted.items()}
            for at, counted in enumerate(self._counted)
        }

    def load_state_dict(self, state: Mapping[int, Any]) -> None:
        for at, counted in enumerate(self._counted):
            for mode in [mode for mode in counted if mode not in state[at]]:
                del counted[mode]
            for mode, values in state[at].items():
                counted[mode].clear()
                counted[mode].update(values)
