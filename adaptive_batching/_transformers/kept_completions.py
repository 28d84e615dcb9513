"""Completions in checkpoints: a run that is resumed goes on with what was generated, as if it had not been cut off.

TRL generates for several batches at once, and learns from a batch several times. A checkpoint of TRL's may lie in
between, but holds no completions: resumed from it, TRL generates again and asks for rewards again, so that the run
differs from one that was not cut off.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device

from adaptive_batching._ranks.agree import Ranks
from adaptive_batching._values import first_line

log = logging.getLogger(__name__)


def save_completions(trainer: Any, checkpoint: Path, ranks: Ranks) -> None:
    """Add this rank's completions to a checkpoint, if there are some that are still to be learned from."""
    together, times = _generated(trainer)
    if trainer._step % (together * times) and trainer._buffered_inputs is not None:
        kept = {"of": _conditions(trainer, ranks), "step": trainer._step, "inputs": trainer._buffered_inputs}
        checkpoint.mkdir(parents=True, exist_ok=True)
        unfinished = _file(checkpoint, ranks).with_suffix(".part")
        torch.save(kept, unfinished)
        unfinished.replace(_file(checkpoint, ranks))


def load_completions(trainer: Any, checkpoint: Path, ranks: Ranks) -> None:
    """Have a trainer go on with the completions of a checkpoint, if all ranks have theirs."""
    kept = _read(_file(checkpoint, ranks))
    is_usable = kept is not None and kept["of"] == _conditions(trainer, ranks)
    if ranks.all(is_usable):
        assert kept is not None
        trainer._step, trainer._buffered_inputs = kept["step"], send_to_device(kept["inputs"], trainer.args.device)
    elif ranks.any(kept is not None):
        log.warning(
            "the completions of %s are of a run with other batches or devices; new ones are generated", checkpoint
        )


def _read(file: Path) -> Any:
    """Return what a file holds; None if there is none, or it cannot be read, which is no reason not to go on."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True) if file.is_file() else None
    except Exception as error:
        log.warning("%s cannot be read (%s); new completions are generated", file, first_line(error))
        return None


def _generated(trainer: Any) -> tuple[int, int]:
    """Return for how many batches completions are generated together, and how often each batch is learned from."""
    together = getattr(trainer.args, "steps_per_generation", None) or trainer.args.gradient_accumulation_steps
    return together, getattr(trainer, "num_iterations", 1)


def _conditions(trainer: Any, ranks: Ranks) -> list[int]:
    args = trainer.args
    return [ranks.size, args.per_device_train_batch_size, args.gradient_accumulation_steps, *_generated(trainer)]


def _file(checkpoint: Path, ranks: Ranks) -> Path:
    return checkpoint / f"adaptive_batching_completions_{ranks.rank}.pt"
