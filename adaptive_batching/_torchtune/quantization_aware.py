"""Quantization-aware training: next tokens, computed with weights and activations as rounding will leave them."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn
from torchao.quantization.qat import api
from torchtune.training import quantization

from adaptive_batching._torchtune.objective import NextToken

log = logging.getLogger(__name__)


class FakeQuantized(NextToken):
    """Next tokens, with rounding that begins with optimizer step ``first_step``, from 0; None for the first.

    A probe runs before the first step, with rounding on, which takes the most memory. ``mode`` is the kind of the
    quantizer, as torchtune names it; ``arguments`` are those of :class:`NextToken`.
    """

    def __init__(self, *arguments: Any, model: nn.Module, first_step: int | None, mode: str | None) -> None:
        super().__init__(*arguments)
        self._model = model
        self._first_step = first_step
        self._mode = mode
        self._is_stock = True
        self._rounds = True

    def leave_stock(self) -> None:
        self._is_stock = False

    def begin_step(self, step: int, samples: int) -> None:
        if self._first_step is None:
            return
        if step == 0 or (step < self._first_step and not self._is_stock):  # a resumed run of stock rounds at once
            self._round(rounds=False, step=step)
        elif step >= self._first_step:
            self._round(rounds=True, step=step)

    def _round(self, *, rounds: bool, step: int) -> None:
        if rounds == self._rounds:
            return
        self._rounds = rounds
        if rounds:
            log.info("step %d: fake quantization is on from here", step)
            self._model.apply(quantization._get_enable_fake_quant(self._mode))
        else:
            log.info("step %d: fake quantization is off until step %s", step, self._first_step)
            self._model.apply(quantization._get_disable_fake_quant(self._mode))


def accept_configs_of_torchao() -> None:
    """Have torchtune's QAT layers of LoRA take the configs that the quantizers of torchao 0.15 make.

    They ask for the class by the name that it had before.
    """
    current = getattr(api, "IntxFakeQuantizeConfig", None)
    if current is not None:
        api.FakeQuantizeConfig = current


def keeps_scales(model: nn.Module) -> bool:
    """Return True if layers of ``model`` keep the scales that they round with until the next forward."""
    return any("FakeQuantizer" in type(module).__name__ for module in model.modules())
