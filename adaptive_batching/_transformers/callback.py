"""A callback that makes the trainer adaptive that it is given to."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback

from adaptive_batching._transformers.arguments import AdaptiveArguments
from adaptive_batching._transformers.trainer import adopt
from adaptive_batching._values import ConfigError


class AdaptiveCallback(TrainerCallback):
    """Makes the trainer adaptive that it is given to, for frameworks that take callbacks and make the trainer.

    ``callbacks=[AdaptiveCallback("auto")]``, where the trainer is made: a callback that is added later raises an error
    when training begins.

    Args:
        settings: ``"auto"``, a mapping of settings, or ``AdaptiveArguments``.
        only_if_possible: True to train without where that cannot be, with one line in the log; see ``adopt``.
    """

    def __init__(
        self, settings: AdaptiveArguments | Mapping[str, Any] | str = "auto", *, only_if_possible: bool = False
    ) -> None:
        self.settings = AdaptiveArguments.of(settings)
        self.only_if_possible = only_if_possible

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._is_off(args):
            adopt(self._trainer(), self.settings, only_if_possible=self.only_if_possible)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        is_adopted = getattr(self._trainer(), "adaptive", None) is not None
        if not (is_adopted or self.only_if_possible or self._is_off(args)):
            raise ConfigError(
                "AdaptiveCallback was added to a trainer that was there already; give it to the trainer when it is "
                "made (callbacks=[...]), or call adopt(trainer, settings) before trainer.train()"
            )

    def _is_off(self, args: Any) -> bool:
        return not self.settings.settings(args.per_device_train_batch_size).enabled

    def _trainer(self) -> Any:
        """Return the trainer that calls: a callback is not told, but the trainer is among its callers."""
        frame = sys._getframe()
        while True:
            handler = getattr(frame.f_locals.get("self"), "callback_handler", None)
            if handler is not None and self in handler.callbacks:
                return frame.f_locals["self"]
            assert frame.f_back is not None
            frame = frame.f_back
