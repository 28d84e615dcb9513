"""The samples of a step, computed by whichever ranks take least time together, wherever they were drawn."""

from __future__ import annotations

import importlib.util
import io
import logging
import pickle
import statistics
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from adaptive_batching._ranks.agree import Ranks
from adaptive_batching._step.share import SampleCost, Share, share_out
from adaptive_batching._step.split import FORWARD_COST
from adaptive_batching._values import first_line

log = logging.getLogger(__name__)

_HAS_NUMPY = importlib.util.find_spec("numpy") is not None  # torch works without it
_RECENT = 64  # forwards whose time says how fast a rank is; a quarter of them are enough to begin with
_UNLIKE = 1.1  # times as fast as another that a rank has to be, as timings are noisy


class Sharing:
    """Shares out the samples of a step among ``ranks``, and sends those that move.

    Each rank says what it has drawn, all compute the same assignment, and few samples are sent, on the host. The
    gradient of a step is a sum over its samples, so that it is the same wherever they are computed, as long as a sample
    has the same weight everywhere; a host says what that is. Steps whose samples weigh otherwise, and samples that
    cannot be sent, stay where they are.

    Args:
        ranks: That train together, each with samples of its own.
        model: That they train; its width says what attention costs.
        waits: True if ranks wait for each other in every forward, so that each seems to be as fast as the slowest.
    """

    def __init__(self, ranks: Ranks, model: nn.Module, *, waits: bool) -> None:
        self.last: Share | None = None
        """How the step was shared out; None if it is not."""

        self._ranks, self._model, self._waits = ranks, model, waits
        self._cost = SampleCost.of_model(hidden_size(model))
        self._paces: deque[float] = deque(maxlen=_RECENT)  # seconds for the work of a token, in forwards of this rank
        self._said_that_weights_differ = self._said_that_dropout_differs = False
        self._can_send = True

    @property
    def balance(self) -> tuple[float, float, int] | tuple[()]:
        """The last values of a step's :class:`~adaptive_batching._report.events.StepCost`; none if it is not shared."""
        share = self.last
        return () if share is None else (share.time.over_mean, share.unbalanced_over_mean, share.num_moved)

    def parts(
        self,
        samples: Sequence[Any],
        lengths: Sequence[int],
        weight: Hashable | None,
        limit: int | None,
        *,
        pads: bool,
    ) -> list[list[Any]] | None:
        """Return what this rank computes of a step, in parts as many as on other ranks; None if each keeps its own.

        Parts at the same place take about as long on all ranks; some can be empty. All ranks call this.

        Args:
            samples: What this rank has drawn.
            lengths: Tokens of each, at least 1.
            weight: Of a sample in the gradient, by any measure, which has to be equal on all ranks; None if samples of
                this rank have different ones.
            limit: Most tokens of a part; the least of all ranks counts.
            pads: False if samples are laid end to end.
        """
        self.last = None
        if not self._can_send:
            return None
        of_ranks = self._ranks.gather((list(lengths), weight, limit, self._pace()))
        lengths_of_ranks, weights, limits, paces = map(list, zip(*of_ranks, strict=True))
        if None in weights or len(set(weights)) > 1:
            if not self._said_that_weights_differ:
                self._said_that_weights_differ = True
                log.info("samples are not balanced over ranks: ranks weight them differently")
            return None
        limit = min(limits, key=_or_infinite)
        cost = replace(self._cost, fixed=min(FORWARD_COST, _or_infinite(limit)))  # no more than that of its tokens
        share = share_out(lengths_of_ranks, cost, _speeds(paces), limit, pads=pads)
        if not all(map(any, share.parts)):  # a rank that computes nothing has no loss to tell
            return None
        received = self._send(samples, share) if share.num_moved else {}
        if received is None:
            return None
        self.last = share
        if share.num_moved and not self._said_that_dropout_differs and has_dropout(self._model):
            self._said_that_dropout_differs = True
            log.info(
                "samples move to other ranks, where dropout draws other numbers for them than with balance_ranks=False"
            )
        rank = self._ranks.rank
        return [[samples[i] if home == rank else received[home, i] for home, i in part] for part in share.parts[rank]]

    def observe(self, lengths: Sequence[int], seconds: float, *, pads: bool) -> None:
        """Take note of a forward and backward of samples of these lengths on this rank."""
        if not self._waits:
            self._paces.append(seconds / replace(self._cost, fixed=0).of_part(lengths, pads=pads))

    def _pace(self) -> float | None:
        return None if len(self._paces) < _RECENT // 4 else statistics.median(self._paces)

    def _send(self, samples: Sequence[Any], share: Share) -> dict[tuple[int, int], Any] | None:
        """Send samples to the ranks that compute them, and return those that come, by where they were drawn.

        The result is None on all ranks if a sample cannot be sent.
        """
        rank, received, failure = self._ranks.rank, dict[tuple[int, int], Any](), ""
        homes = [{home for part in parts for home, _ in part} for parts in share.parts]
        outgoing = {other: b"" for other, drawn_by in enumerate(homes) if rank in drawn_by and other != rank}
        try:
            for other in outgoing:
                moved = {(home, i): samples[i] for part in share.parts[other] for home, i in part if home == rank}
                outgoing[other] = pickled(moved)
        except Exception as error:  # of code of the samples' own
            failure = _in_words(error)
        incoming = self._ranks.exchange(outgoing, sorted(homes[rank] - {rank}))
        try:
            for blob in filter(None, incoming):  # none comes of a failure, which its rank tells below
                received.update(pickle.loads(blob))
        except Exception as error:
            failure = _in_words(error)
        if not self._ranks.any(bool(failure)):
            return received
        self._can_send = False
        reason = next(filter(None, self._ranks.gather(failure)))
        log.warning(
            "samples are not balanced over ranks: they cannot be sent (%s); make them picklable, or set "
            "balance_ranks=False", reason
        )  # fmt: skip
        return None


def gathered(ranks: Ranks, samples: Sequence[Any]) -> tuple[list[list[Any]], str]:
    """Return the samples of each rank, on all of them, or else why they cannot be sent, in words."""
    blob, of_ranks, failure = b"", list[list[Any]](), ""
    try:
        blob = pickled([*samples])
    except Exception as error:
        failure = _in_words(error)
    blobs, failures = zip(*ranks.gather((blob, failure)), strict=True)
    try:
        of_ranks = [] if any(failures) else [pickle.loads(blob) for blob in blobs]
    except Exception as error:
        failure = _in_words(error)
    failure = next(filter(None, ranks.gather(failure)), "")
    return [] if failure else of_ranks, failure


def pickled(value: Any) -> bytes:
    """Return ``value`` as bytes for :func:`pickle.loads` on another rank, with tensors on that rank's device.

    A tensor is sent as its own values: pickled by itself, it would take along all that it is a slice of.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if not _HAS_NUMPY or type(value) is not torch.Tensor or value.layout != torch.strided or value.requires_grad:
            return NotImplemented
        numbers = value.cpu().contiguous().flatten().view(torch.uint8).numpy()
        return _tensor, (numbers, value.dtype, value.shape, value.device.type)


def _tensor(numbers: Any, dtype: torch.dtype, shape: torch.Size, device: str) -> torch.Tensor:
    return torch.from_numpy(numbers).view(dtype).view(shape).to(device)


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def _speeds(paces: Sequence[float | None]) -> list[float] | None:
    """Return how fast ranks are, relative to the slowest; None if they are alike, or not known yet."""
    known = [pace for pace in paces if pace is not None]
    if len(known) < len(paces) or max(known) < _UNLIKE * min(known):
        return None
    return [max(known) / pace for pace in known]


def hidden_size(model: nn.Module) -> int:
    """Return the width of the first embedding of ``model``, or 4,096 if it has none."""
    return next((module.embedding_dim for module in model.modules() if isinstance(module, nn.Embedding)), 4096)


def has_dropout(model: nn.Module) -> bool:
    """Return True if a module in training mode has a probability that its name or that of the module says is to drop.

    Attention often has a number in place of a module.
    """
    return any(
        isinstance(value, float) and value > 0 and "drop" in f"{type(module).__name__} {name}".lower()
        for module in model.modules()
        if module.training
        for name, value in vars(module).items()
    )


def _or_infinite(limit: int | None) -> float:
    return float("inf") if limit is None else limit
