"""Torchtune's decoders on samples that lie end to end in one row, [1, tokens]: each attends to itself alone.

A model takes the row's :class:`SampleBounds` as its ``mask``, and hands them on to all layers, also to those that are
computed again in the backward pass. Attention itself goes through what its module calls, ``_attention_call``, which is
replaced while a row runs. The output layer, which in small models takes a fifth of the time, computes the logits that
:class:`RowBounds` ask for. Which models compute a row as they do its samples is measured, not listed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torchtune.models.gemma2._attention import Gemma2Attention
from torchtune.modules import MultiHeadAttention, TransformerDecoder

from adaptive_batching._attention import SampleBounds, attend_within_samples, for_each_head
from adaptive_batching._device import without_waiting
from adaptive_batching._state import State, rehearsal
from adaptive_batching._values import first_line

# Tokens of samples that are run to see whether a model honours bounds: of unlike lengths, the first not the longest.
_LENGTHS = (5, 9, 3)
# Times that outputs of a row may differ as much as those of a batch with padding do, where both are rounding, and steps
# of the type's precision that they may differ by in any case.
_TIMES_PADDING, _STEPS = 16, 4


class RowBounds(SampleBounds):
    """Where the samples of a row lie, and which of its tokens need logits, because they predict a target.

    Args:
        lengths: Tokens of each sample, in the order of the row.
        predicting: [n] int64, on the host: indices of tokens in the row.
    """

    def __init__(self, lengths: Sequence[int], predicting: torch.Tensor) -> None:
        super().__init__(lengths)
        self._predicting = predicting

    def predicting(self, like: torch.Tensor) -> torch.Tensor:
        """Return the indices of tokens that need logits, [n], on the device of ``like``."""
        return self._kept("predicting", like, lambda: without_waiting(self._predicting, like.device))


class RowSeams:
    """Where models are entered so that they take rows of samples, and all else as before."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._seams: list[tuple[nn.Module, str, Any]] = []
        self._rotaries = dict[nn.Module, _Rotary]()  # which layers share
        for module in (module for model in models for module in model.modules()):
            if isinstance(module, TransformerDecoder):
                decoder = _Decoder(module)
                self._seams.append((module, "_validate_inputs", decoder.validate))
                self._seams.append((module, "unembed", decoder.unembed))
            elif isinstance(module, MultiHeadAttention):
                self._seams.append((module, "_attention_call", _within_samples(module)))
                # so that keys and values are not copied for all heads that share them; kernels need not
                self._seams.append((module, "num_kv_heads", module.num_heads))
                rotary = module.pos_embeddings
                if "cache" in getattr(rotary, "_buffers", ()) and rotary not in self._rotaries:
                    self._rotaries[rotary] = _Rotary(rotary)
                    self._seams.append((rotary, "forward", self._rotaries[rotary].forward))
            elif isinstance(module, Gemma2Attention):  # caps its scores
                self._seams.append((module, "forward", _sample_by_sample(module.forward)))

    @property
    def has_attention(self) -> bool:
        """True if any of the models has an attention that can stay within samples."""
        return any(isinstance(module, MultiHeadAttention | Gemma2Attention) for module, _, _ in self._seams)

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Let the models take rows inside, in forward and backward passes."""
        before = [vars(module).get(name) for module, name, _ in self._seams]
        try:
            for module, name, function in self._seams:
                vars(module)[name] = function
            yield
        finally:
            for (module, name, _), function in zip(self._seams, before, strict=True):
                if function is None:
                    vars(module).pop(name, None)
                else:
                    vars(module)[name] = function
            for rotary in self._rotaries.values():
                rotary.forget()


def _within_samples(module: MultiHeadAttention) -> Callable[..., torch.Tensor]:
    stock, causal = module._attention_call, module.is_causal

    def attention(q: Any, k: Any, v: Any, mask: Any, dropout_p: float, is_causal: bool) -> torch.Tensor:
        if not isinstance(mask, SampleBounds):
            k, v = for_each_head(q, k, v)
            return stock(q, k, v, mask=mask, dropout_p=dropout_p, is_causal=is_causal)  # type: ignore[no-any-return]
        return attend_within_samples(q, k, v, mask, causal=causal, dropout=dropout_p)  # type: ignore[no-any-return]

    return attention


def _sample_by_sample(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def forward(x: Any, y: Any, *, mask: Any = None, input_pos: Any = None) -> torch.Tensor:
        if not isinstance(mask, SampleBounds):
            return stock(x, y, mask=mask, input_pos=input_pos)
        return torch.cat([stock(sample, sample) for sample in x.split(mask.lengths, 1)], 1)

    return forward


class _Decoder:
    """A decoder's checks of its input, and its output layer, which get to know the bounds of a row one by the other."""

    def __init__(self, module: TransformerDecoder) -> None:
        self._validate, self._unembed = module._validate_inputs, module.unembed
        self._bounds: Any = None  # the mask of the forward that runs

    def validate(self, seq_len: int, mask: Any = None, **others: Any) -> None:
        self._bounds = mask
        if isinstance(mask, SampleBounds):  # positions start over, so that a sample has to be within bounds, not a row
            self._validate(mask.longest, **others)
        else:
            self._validate(seq_len, mask=mask, **others)

    def unembed(self, hidden: torch.Tensor) -> Any:
        bounds, self._bounds = self._bounds, None
        if isinstance(bounds, RowBounds):
            hidden = hidden.index_select(1, bounds.predicting(hidden))
        return self._unembed(hidden)


class _Rotary:
    """Angles of a row's positions, looked up once for all layers, for each of which stock would keep two copies."""

    def __init__(self, module: Any) -> None:
        self._module, self._forward = module, module.forward
        self._positions: torch.Tensor | None = None
        self._angles: torch.Tensor | None = None  # [tokens, ...], of these positions

    def forward(self, x: torch.Tensor, *, input_pos: torch.Tensor | None = None) -> torch.Tensor:
        if input_pos is None or len(input_pos) > 1 or torch.compiler.is_compiling():  # which fuses the lookup
            return self._forward(x, input_pos=input_pos)  # type: ignore[no-any-return]
        buffers = self._module._buffers
        whole = buffers["cache"]
        if input_pos is not self._positions:
            self._positions, self._angles = input_pos, whole[input_pos[0]]
        buffers["cache"] = self._angles
        try:
            return self._forward(x)  # type: ignore[no-any-return]
        finally:
            buffers["cache"] = whole

    def forget(self) -> None:
        self._positions = self._angles = None


def why_not_in_rows(models: Sequence[nn.Module]) -> str | None:
    """Return why a model would compute a row otherwise than its samples, in words; None if all compute it alike.

    Runs five short forwards of each, in evaluation mode and without gradients, and leaves everything as it was. Ranks
    that have shards of a model have to call it together.
    """
    for model in models:
        device = next(model.parameters()).device
        with rehearsal(State([model]), device), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            model.eval()
            try:
                why = _difference(model, device)
            except Exception as error:  # of a model that nobody here has seen
                why = f"fails on a row ({type(error).__name__}: {first_line(error)})"
        if why is not None:
            return f"{type(model).__name__} {why}"
    return None


def _difference(model: nn.Module, device: torch.device) -> str | None:
    def output(tokens: torch.Tensor, **others: Any) -> torch.Tensor:
        values = model(tokens=tokens.to(device), **others)
        return (torch.cat(values, 1) if isinstance(values, list) else values).detach().double().cpu()

    seams = RowSeams([model])
    if not seams.has_attention:
        return "has an attention of its own"
    samples = [torch.arange(1, length + 1)[None] + 7 * number for number, length in enumerate(_LENGTHS)]
    others = [samples[0].flip(1), *samples[1:]]  # the first is another sample
    bounds = SampleBounds(_LENGTHS)
    alone = [output(sample) for sample in samples]
    padded = output(torch.cat([nn.functional.pad(each, (0, max(_LENGTHS) - each.shape[1])) for each in samples]))
    in_row = partial(output, mask=bounds, input_pos=bounds.positions().to(device))
    with seams.open():
        row, another = in_row(torch.cat(samples, 1)), in_row(torch.cat(others, 1))
    if not torch.equal(row[:, _LENGTHS[0] :], another[:, _LENGTHS[0] :]):
        return "has samples of a row change those after them"
    eps = torch.finfo(dtype_of(model)).eps
    noise = max(_off(few[None, : one.shape[1]], one) for few, one in zip(padded, alone, strict=True))
    off = max(map(_off, torch.split(row, list(_LENGTHS), 1), alone))
    if off > max(_TIMES_PADDING * noise, _STEPS * eps):
        return f"computes a row with a difference of {off:.1e}, where padding makes one of {noise:.1e}"
    return None


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the type that a model computes in: that of the first of its parameters that are no integers."""
    return next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())


def _off(values: torch.Tensor, expected: torch.Tensor) -> float:
    return float((values - expected).abs().mean() / expected.abs().mean())
