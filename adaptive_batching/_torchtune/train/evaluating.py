"""Evaluation through EleutherAI's harness: batches as large as fit, whose results are those of a batch of one."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

import torch
from omegaconf import DictConfig
from torchtune.modules import delete_kv_caches
from tqdm import tqdm

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._loop.auto_batcher import AutoBatcher
from adaptive_batching._memory import memory_meter
from adaptive_batching._probe.does_not_fit import DoesNotFitError, within_memory_limit
from adaptive_batching._probe.find import find_largest
from adaptive_batching._probe.probed_step import TrainingStep
from adaptive_batching._probe.sizing import ProbeRequest, within
from adaptive_batching._torchtune.stock.loading import any_version_of_the_harness, replaced_in
from adaptive_batching._torchtune.train.settings import read_evaluation
from adaptive_batching._unused_memory import keep_little_on_the_host, little_to_collect, release_cached_memory
from adaptive_batching._values import ConfigError

log = logging.getLogger(__name__)

Result = TypeVar("Result")
Forward = Callable[[range], Sequence[Result]]


class AdaptiveEvaluation:
    """Mixed into stock's recipe for evaluation, before it in the list of bases.

    With ``use_maximum_batch_size`` unset it evaluates as stock, bit for bit, as long as ``batch_size`` fits.
    """

    stock: ModuleType
    """The module of stock's recipe."""

    wrapper: type[BatchesThatFit]
    """Wrapper of the model for the harness, in place of stock's."""

    def __init__(self, cfg: DictConfig) -> None:
        self._settings = read_evaluation(cfg)
        if self._settings.enabled and cfg.device == "cpu":
            keep_little_on_the_host()
        with any_version_of_the_harness():
            super().__init__(cfg=cfg)  # type: ignore[call-arg]

    def setup(self, cfg: DictConfig) -> None:
        with replaced_in(self.stock, _LLMEvalWrapper=self.wrapper):
            super().setup(cfg=cfg)  # type: ignore[misc]
        wrapper: Any = self.eleuther_model_wrapper  # type: ignore[attr-defined]
        if isinstance(wrapper, BatchesThatFit):
            wrapper.settings = self._settings
        elif self._settings.enabled:
            log.warning(
                "use_maximum_batch_size=True does nothing for a model that reads images: torchtune generates one "
                "sample at a time; batch_size stays %s", cfg.batch_size,
            )  # fmt: skip

    def evaluate(self) -> None:
        with little_to_collect() if self._settings.enabled else contextlib.nullcontext():
            super().evaluate()  # type: ignore[misc]


class BatchesThatFit:
    """Mixed into stock's wrapper of a model for the harness, before it in the list of bases.

    The harness asks for the results of all requests of one type at once. With ``use_maximum_batch_size`` the longest of
    them are run to find the largest batch that fits, and then all, the longest first. A batch that runs out of memory
    runs again in smaller ones.

    Results are those of a batch of one, up to rounding: rows of a batch do not see each other, and what is generated
    for one ends with its first stop token, however long the others go on.
    """

    settings = AdaptiveBatchingConfig()
    """The user's settings."""

    # Set by stock's wrapper
    _batch_size: int | str
    _tokenizer: Any
    device: torch.device
    max_length: int
    model: Any

    _in_parts = False

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
        stock: Any = super().loglikelihood_rolling  # type: ignore[misc]
        if not self.settings.enabled:
            return stock(requests, disable_tqdm)
        with replaced_in(self, _batch_size=sys.maxsize):  # type: ignore[arg-type] # the windows of all texts come at once
            return stock(requests, disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> Any:
        stock: Any = super()._loglikelihood_tokens  # type: ignore[misc]
        done, answers = self._as_stock(partial(stock, requests, disable_tqdm, override_bs))
        if done or not requests:
            return answers
        # The harness runs one row for those that differ in the last token alone, such as letters to choose from.
        sharing: dict[tuple[int, ...], list[int]] = {}
        for index, (_, context, continuation) in enumerate(requests):
            sharing.setdefault((*context, *continuation[:-1]), []).append(index)
        rows = sorted(sharing.items(), key=lambda row: len(row[0]), reverse=True)

        def forward(part: range) -> list[list[Any]]:
            self._batch_size = len(part)
            of_rows = [rows[row][1] for row in part]
            answers = iter(stock([requests[index] for indices in of_rows for index in indices], disable_tqdm=True))
            return [[(index, next(answers)) for index in indices] for indices in of_rows]

        lengths = [min(len(tokens), self.max_length) for tokens, _ in rows]
        found = self._run_in_parts("loglikelihood", lengths, forward, forward, disable_tqdm)
        by_index = dict(answer for of_row in found for answer in of_row)
        return [by_index[index] for index in range(len(requests))]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> Any:
        stock: Any = super().generate_until  # type: ignore[misc]
        done, texts = self._as_stock(partial(stock, requests, disable_tqdm))
        if done or not requests:
            return texts
        lengths = [len(self.tok_encode(request.args[0])) for request in requests]  # type: ignore[attr-defined]
        longest_first = sorted(range(len(requests)), key=lambda index: lengths[index], reverse=True)
        # The harness runs only those together that are to be generated alike.
        order = sorted(longest_first, key=lambda index: repr(requests[index].args[1]))

        def forward(part: range) -> Sequence[str]:
            self._batch_size = len(part)
            texts: Sequence[str] = stock([requests[order[row]] for row in part], disable_tqdm=True)
            return texts

        def at_worst(part: range) -> Sequence[str]:
            self._batch_size = len(part)
            chosen = [requests[longest_first[row]].args[0] for row in part]
            if len(part) > 1:
                chosen[-1] = requests[longest_first[-1]].args[0]  # with padding, each row has a mask of its own
            alike = requests[longest_first[0]].args[1]
            prompts = [SimpleNamespace(args=(prompt, alike)) for prompt in chosen]  # what the harness reads of requests
            with replaced_in(self, _tokenizer=_WithoutStopTokens(self._tokenizer)):  # type: ignore[arg-type]
                texts: Sequence[str] = stock(prompts, disable_tqdm=True)
            return texts

        # Each takes a cache of that length, however long it is.
        row_lengths = [self.max_length] * len(order)
        texts_in_order = self._run_in_parts("generate_until", row_lengths, forward, at_worst, disable_tqdm)
        by_index = dict(zip(order, texts_in_order, strict=True))
        return [by_index[index] for index in range(len(requests))]

    def _model_generate(self, context: torch.Tensor, **kwargs: Any) -> Any:
        stock: Any = super()._model_generate  # type: ignore[misc]
        if not self._in_parts:
            return stock(context, **kwargs)
        self._batch_size = len(context)  # else stock fills up
        stops, start = frozenset(self._tokenizer.stop_tokens), context.shape[1]

        def until_stop(row: list[int]) -> list[int]:
            end = next((at for at in range(start, len(row)) if row[at] in stops), len(row) - 1)
            return row[: end + 1]

        rows = [until_stop(row) for row in stock(context, **kwargs).tolist()]
        return SimpleNamespace(tolist=lambda: rows)  # rows differ in length, where the harness reads a tensor of them

    def _as_stock(self, run: Callable[[], Any]) -> tuple[bool, Any]:
        """With the field unset, run as stock does; return True and the results, or False if they are still to come.

        All that ran has to run again: the harness makes a second tensor as large as the logits, outside of stock's
        wrapper, where memory may run out as well.
        """
        if self.settings.enabled:
            return False, []
        if not isinstance(self._batch_size, int):
            return True, run()
        outcome = AutoBatcher(1, self._discard).run_once(run)
        if not outcome.failed:
            return True, outcome.results[0]
        if not self.settings.recover_from_oom:
            raise DoesNotFitError(
                f"out of memory with batch_size={self._batch_size}; set a smaller one, or "
                f"adaptive_batching.recover_from_oom=True"
            ) from outcome.error
        before, self._batch_size = self._batch_size, max(self._batch_size // 2, 1)
        log.warning(
            "out of memory with batch_size=%d; running the requests again, at most %d at a time",
            before, self._batch_size,
        )  # fmt: skip
        return False, []

    def _run_in_parts(
        self, kind: str, lengths: Sequence[int], forward: Forward[Result], at_worst: Forward[Any], disable_tqdm: bool
    ) -> list[Result]:
        """Return a result for each row; ``lengths`` are tokens, the longest first.

        ``at_worst`` runs as many rows as ``forward``, from the first on, in as much memory as they can take.
        """
        self.model.requires_grad_(False)  # stock has a graph made of what it scores
        hidden = {"disable": True} if disable_tqdm else {}  # else as the environment says
        shown = tqdm(total=len(lengths), desc=f"Running {kind} requests", **hidden)
        in_parts: Any = {"_batch_size": self._batch_size, "_in_parts": True}
        with replaced_in(self, **in_parts), shown as bar:

            def counted(part: range) -> Sequence[Result]:
                results = forward(part)
                bar.update(len(part))
                return results

            rows = self._rows_that_fit(kind, lengths, at_worst)
            with within_memory_limit(self.settings, self.device):
                return rows.run(lengths, counted)

    def _rows_that_fit(self, kind: str, lengths: Sequence[int], at_worst: Forward[Any]) -> AutoBatcher:
        settings, longest = self.settings, lengths[0]
        remedy = f"set max_seq_length below {self.max_length}"
        if not settings.enabled:
            assert isinstance(self._batch_size, int)
            fits = longest * self._batch_size
            return AutoBatcher(fits, self._discard, most=self._batch_size, remedy=remedy)
        upper, reason = within(settings, len(lengths), f"the {len(lengths)} rows of these requests")
        try:
            meter = memory_meter(self.device)
        except NotImplementedError as error:
            raise ConfigError(str(error)) from error
        log.info("probing %s requests, of up to %d tokens", kind, longest)

        def run(part: range) -> None:
            at_worst(part)

        result = find_largest(
            TrainingStep(self.model, [], range, run, self._discard),
            settings,
            meter,
            ProbeRequest(upper, reason, rounds=False, coarse=True),  # the results do not depend on the size
            remedy=remedy,
        )
        fits, most = longest * result.batch_size, settings.max_batch_size
        recovers = settings.recover_from_oom
        return AutoBatcher(fits, self._discard, most=most, has_fitted=True, recovers=recovers, remedy=remedy)

    def _discard(self) -> None:
        if self.model.caches_are_setup():
            delete_kv_caches(self.model)
        release_cached_memory(self.device)


class _WithoutStopTokens:
    """A tokenizer with which what is generated is as long as it can be."""

    stop_tokens: tuple[int, ...] = ()

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)
