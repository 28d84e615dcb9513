"""The callback that ``adaptive-batching run -- <command>`` adds to each trainer."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from adaptive_batching._transformers.callback import AdaptiveCallback
from adaptive_batching._transformers.run_command import SETTINGS


class OfCommand(AdaptiveCallback):
    """Makes a trainer adaptive with the settings of the command, and says so; what cannot be trains as it would."""

    def __init__(self) -> None:
        super().__init__(json.loads(os.environ[SETTINGS]), only_if_possible=True)

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self._trainer()
        if getattr(trainer, "adaptive", None) is not None:  # its script says so, too
            return
        super().on_init_end(args, state, control, **kwargs)
        if (run := getattr(trainer, "adaptive", None)) is not None and state.is_local_process_zero:
            given = ", ".join(f"{name}={value}" for name, value in run.given.items())
            print(f"adaptive-batching run: {type(trainer).__name__} is adaptive ({given})", file=sys.stderr)
