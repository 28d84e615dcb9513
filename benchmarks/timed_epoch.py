"""An epoch of a recipe that has been set up, timed, with what happens in it."""

from __future__ import annotations

import functools
import time
from typing import Any

import torch

from adaptive_batching._memory.meter import memory_meter
from adaptive_batching._step.row_size import RowSize


def time_epoch(recipe: Any) -> dict[str, Any]:
    """Train; return the seconds of that, its checkpoint included, what :class:`Noted` has noted, and the peak.

    If other programs are running, processor seconds are more reliable.
    """
    noted, meter = Noted(recipe), memory_meter(recipe._device)
    meter.release()
    meter.reset_peak()
    start, used = time.perf_counter(), time.process_time()
    recipe.train()
    meter.synchronize()
    seconds, used = time.perf_counter() - start, time.process_time() - used
    return {
        "seconds": round(seconds, 2),
        "processor": round(used, 2),
        **vars(noted),
        "peak_mib": meter.peak_bytes() // 2**20,
    }


class Noted:
    """Notes taken while a recipe trains: losses, tokens of forwards with a gradient, and seconds of each part."""

    def __init__(self, recipe: Any) -> None:
        self.losses: list[float] = []
        self.padded = self.real = self.forwards = 0
        self.seconds_in_forwards = self.seconds_in_optimizer = self.seconds_in_checkpoint = 0.0
        pad_id = recipe._tokenizer.pad_id

        def count(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            if torch.is_grad_enabled():
                tokens = kwargs["tokens"] if "tokens" in kwargs else args[0]
                self.padded += tokens.numel()
                self.real += int((tokens != pad_id).sum())
                self.forwards += 1

        def observe(rows: RowSize, tokens: int, seconds: float) -> None:
            self.seconds_in_forwards += seconds
            original(rows, tokens, seconds)

        original = RowSize.observe
        RowSize.observe = observe  # type: ignore[method-assign, assignment]
        recipe._model.register_forward_pre_hook(count, with_kwargs=True)
        recipe._metric_logger.log_dict = lambda payload, step: self.losses.append(float(payload["loss"]))
        recipe._optimizer.step = self._timed(recipe._optimizer.step, "seconds_in_optimizer")
        recipe.save_checkpoint = self._timed(recipe.save_checkpoint, "seconds_in_checkpoint")

    def _timed(self, function: Any, total: str) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                setattr(self, total, getattr(self, total) + time.perf_counter() - start)

        return functools.wraps(function)(run)
