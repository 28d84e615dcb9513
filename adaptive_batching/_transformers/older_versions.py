"""Workarounds for transformers before 5.19. Each can be deleted when its version is no longer supported."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import transformers
from packaging.version import Version
from transformers import Trainer
from transformers.loss.loss_utils import ForCausalLMLoss

from adaptive_batching._transformers.handed_out import replaced
from adaptive_batching._values import ConfigError

_VERSION = Version(transformers.__version__)
_DIVIDES_AS_ASKED = hasattr(Trainer, "loss_is_scaled_for_ga")
"""True from 5.19 on, where a trainer can say if the losses of accumulated batches are to be divided."""


def check_version() -> None:
    """Raise ConfigError if transformers is older than what was tried."""
    if Version("4.57") > _VERSION:
        raise ConfigError(f"transformers {_VERSION} is too old: pip install 'transformers>=4.57'")


def check_rotary(model: Any) -> None:
    """Raise ConfigError if rotary frequencies follow the longest sequence so far and cannot be set back.

    From 5.16 on, a model can be put back to where it was, and measuring shows if the frequencies change the result.
    """
    config = getattr(model, "config", None)
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}  # before 5
    kinds = [given.get("rope_type"), *(each.get("rope_type") for each in given.values() if isinstance(each, Mapping))]
    if "dynamic" in kinds and Version("5.16") > _VERSION:
        raise ConfigError(
            f"rope_type='dynamic' follows the longest sequence so far, which transformers {_VERSION} does not forget: "
            "parts of a batch would run with other frequencies than the batch; pip install 'transformers>=5.16', or "
            "take another rope_type"
        )


def shifts_labels(trainer: Any) -> bool:
    """Return True if the model's loss has no target in the first label of a row. Before 5.16, Trainer did not ask."""
    if hasattr(trainer, "_loss_shifts_labels"):
        return bool(trainer._loss_shifts_labels)
    model = trainer.model.get_base_model() if hasattr(trainer.model, "get_base_model") else trainer.model
    is_causal = getattr(model, "loss_function", None) is ForCausalLMLoss
    return is_causal and not getattr(getattr(model, "config", None), "is_encoder_decoder", False)


def declared_as_scaled(trainer: Any) -> bool | None:
    """Return what the class of a trainer says of its loss, where ``Trainer`` asks for it.

    TRL's say it whatever the version of transformers.
    """
    return type(trainer).loss_is_scaled_for_ga if _DIVIDES_AS_ASKED else None


def scaling_loss_func(trainer: Any, weight: float) -> contextlib.AbstractContextManager[None]:
    """Have ``compute_loss_func`` return its mean times ``weight``, where ``Trainer`` divides no loss of one."""
    function = getattr(trainer, "compute_loss_func", None)
    if function is None or _DIVIDES_AS_ASKED:
        return contextlib.nullcontext()
    return replaced(trainer, compute_loss_func=lambda *given, **more: function(*given, **more) * weight)
