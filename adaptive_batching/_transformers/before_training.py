"""Run ``train`` of a trainer up to its first step, and put everything back."""

from __future__ import annotations

from typing import Any

from adaptive_batching._device import unchanged_random_state
from adaptive_batching._values import ConfigError

_KEPT = ("model", "model_wrapped", "optimizer", "lr_scheduler", "is_in_train", "_train_batch_size")


class BeforeTraining(Exception):  # no error
    """Ends ``train`` where its first step would begin."""


def begin_to_train(trainer: Any) -> None:
    """Call ``train`` of a trainer, which :class:`BeforeTraining` ends, and put back what has changed.

    Raises:
        ConfigError: If the model would stay sharded.
    """
    if trainer.is_fsdp_enabled:
        raise ConfigError(
            "trainer.adaptive.find() would leave the model sharded; with FSDP2, print trainer.adaptive in a callback's "
            "on_train_begin"
        )
    kept = {name: getattr(trainer, name) for name in _KEPT}
    modes = [(module, module.training) for module in trainer.model.modules()]
    try:
        with unchanged_random_state(trainer.args.device):
            trainer.train()
    except BeforeTraining:
        pass
    finally:
        if (neftune := getattr(trainer, "neftune_hook_handle", None)) is not None:
            neftune.remove()
        trainer.accelerator.free_memory()  # which train does first, too
        for module, training in modes:
            module.training = training
        for name, value in kept.items():
            setattr(trainer, name, value)
