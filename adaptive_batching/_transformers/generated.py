"""Trainers of TRL that generate what they learn from (GRPO, RLOO): a prepared batch runs in parts, with its gradient.

What is generated stays whole: prompts, completions, rewards and the advantages within groups are TRL's. All that TRL
computes from a model are log-probabilities and entropies, by one method. Here that runs some rows of the batch, and has
values without a graph for the others. TRL's own loss of the *whole* batch then gives each row the gradient that it has
in it, whatever the type of loss. A last call, on the values of all rows and without the model, is TRL's loss with its
metrics, once.
"""

from __future__ import annotations

import collections
import contextlib
import heapq
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._device import RandomState
from adaptive_batching._loop.step import clip_and_step
from adaptive_batching._memory.meter import memory_meter
from adaptive_batching._memory.out_of_memory import forget_frames, is_out_of_memory
from adaptive_batching._memory.unused_memory import little_to_collect, release_cached_memory
from adaptive_batching._probe.does_not_fit import DoesNotFitError
from adaptive_batching._probe.find import find_largest
from adaptive_batching._probe.probed_step import TrainingStep
from adaptive_batching._probe.sizes import ProbeResult
from adaptive_batching._probe.sizing import ProbeRequest
from adaptive_batching._ranks.agree import Ranks
from adaptive_batching._state import State, parameters_of
from adaptive_batching._step.data_parallel import DataParallel
from adaptive_batching._step.failed_part import FailedPart, Words
from adaptive_batching._step.forward_timer import ForwardTimer
from adaptive_batching._step.forward_times import ForwardTimes
from adaptive_batching._step.limits import TokenLimit
from adaptive_batching._step.row_size import RowSize, first_row
from adaptive_batching._step.runner import StepRunner
from adaptive_batching._step.split import SplitRule, split_samples
from adaptive_batching._step.work import Part, Work
from adaptive_batching._transformers.generated_recording import GeneratedRecording
from adaptive_batching._transformers.generated_rows import (
    METHOD,
    PreparedBatch,
    PreparedRow,
    Rows,
    TokenValues,
    owner_of_method,
    sample_batch,
)
from adaptive_batching._transformers.handed_out import replaced, without_gathering
from adaptive_batching._transformers.kept_completions import load_completions, save_completions
from adaptive_batching._transformers.refusals import check_parallelism
from adaptive_batching._transformers.trainer_probe import without_ddp
from adaptive_batching._values import AdaptiveBatchingError, ByLength, ConfigError, Fixed, first_line

log = logging.getLogger(__name__)

_NEEDED = (METHOD, "_compute_loss", "_generate_and_score_completions")
_LESS_MEMORY = "gradient_checkpointing=True, bf16=True, LoRA, or a smaller max_completion_length"
_SETTINGS = {"micro_batch_size", "padding", "memory_limit", "headroom", "search", "recover_from_oom", "report_dir"}
_FACTORS = {"advantages", "importance_sampling_ratio"}  # of the losses of rows or tokens, which may be 0
_READ_AT_ONCE = 1000  # prompts of the data
_TOKENIZED = 64  # of those with the most characters, whose tokens are counted
_LOOKED_AT = (5, 9, 3), (6, 4, 8)  # tokens of prompts and completions that run padded and packed


def scores_completions(trainer_class: type) -> bool:
    """Return True for a class of trainers whose loss is computed from what :data:`METHOD` returns."""
    return all(hasattr(trainer_class, name) for name in _NEEDED)


@dataclass(frozen=True)
class RowsPart(Part):
    """Rows of one forward and, if they are learned from, backward."""

    learns: bool = True


class RowsWork(Work[Any, RowsPart, Any]):
    """Rows of a prepared batch, in parts."""

    everything = "the step's completions"
    """All that runs again, for messages."""

    def __init__(self, run: GeneratedRun, device: torch.device) -> None:
        self._run, self.device, self.state = run, device, State([run._trainer.model])
        self.limit = TokenLimit()

    def parts(self, rows: Sequence[PreparedRow], rule: SplitRule, *, learns: bool) -> list[RowsPart]:
        """Return ``rows`` in parts that are expected to fit."""
        lengths, pads = [row.tokens for row in rows], not self._run.rows.packed
        most = self.limit.max_tokens
        if most is not None and rule.by_length and not pads:
            most = self._run.row_size.tokens(sum(lengths), most)
        split = split_samples(lengths, rule, most, pads=pads)
        lists = [[rows[at] for at in part] for part in split]
        return [
            RowsPart(part, self.tokens(part), longest=max(row.tokens for row in part), learns=learns) for part in lists
        ]

    def tokens(self, samples: Sequence[PreparedRow]) -> int:
        lengths = [row.tokens for row in samples]
        return sum(lengths) if self._run.rows.packed else len(lengths) * max(lengths)

    def length(self, sample: PreparedRow) -> int:
        return sample.tokens

    def words(self) -> Words:
        smaller = "set a smaller micro_batch_size"
        return Words(f"set {_LESS_MEMORY}", smaller, noun="completion", everything=self.everything)

    def failed(self, part: RowsPart) -> FailedPart:
        failed = super().failed(part)
        return replace(failed, unit="tokens") if self._run.rows.packed else failed


class CompletionsWork(RowsWork):
    """Forward and backward of prepared batches, each of which leaves the gradient of TRL's loss of all of it."""

    def split(self, samples: Sequence[PreparedBatch]) -> Iterator[list[RowsPart]]:
        run = self._run
        for batch in samples:
            if run.rows_depend(batch):
                yield self.parts(batch.rows, run.rule, learns=False)
                run.take_entropy_mask(batch)
            yield self.parts(batch.rows, run.rule, learns=True)

    def runs(self, parts: Sequence[RowsPart]) -> list[Callable[[], Any]]:
        return [partial(self._run.forward_backward, part) for part in parts]

    def parameters(self) -> list[nn.Parameter]:
        return self._run.parameters()

    def put_back(self) -> None:
        self._run.timer.forget()


@dataclass(frozen=True)
class Call:
    """A call of :data:`METHOD` for values without a gradient, of the old policy or the reference."""

    model: nn.Module
    batch: PreparedBatch
    rule: SplitRule
    more: Mapping[str, Any]


class ForwardWork(RowsWork):
    """Log-probabilities without a gradient."""

    everything = "the completions"
    call: Call

    def split(self, samples: Call) -> Iterator[list[RowsPart]]:
        self.call = samples
        yield self.parts(self.call.batch.rows, self.call.rule, learns=False)

    def runs(self, parts: Sequence[RowsPart]) -> list[Callable[[], tuple[TokenValues, tuple[Any, ...]]]]:
        return [partial(self._run_one, part) for part in parts]

    def _run_one(self, part: RowsPart) -> tuple[TokenValues, tuple[Any, ...]]:
        call, rows = self.call, [row.index for row in part.samples]
        with self._run.rows.around(call.model, call.batch, rows):
            return self._run.rows.run(call.model, call.batch, rows, **call.more)


class GeneratedRun:
    """The adaptive part of a run that generates, available as ``trainer.adaptive``; printed, what it has found."""

    rows_of: Callable[[Any], Rows] = Rows
    forward_work: type[RowsWork] = ForwardWork

    def __init__(
        self,
        trainer: Any,
        settings: AdaptiveBatchingConfig,
        given: Mapping[str, Any],
        *,
        only_if_possible: bool = False,
    ) -> None:
        check_generating(trainer, settings, given)
        self.only_if_possible = only_if_possible
        """True to train as TRL does where an error would be raised before anything is generated."""

        self.settings, self.given = settings, given
        self.probe: ProbeResult | None = None
        """The most completions of a forward pass, with every measurement; None if none was looked for as yet."""

        self.longest = 0
        """Tokens of the longest prompt and completion, which are probed."""

        self.waited = 0.0
        """Seconds that the probe has taken."""

        self.parts_of_step: list[RowsPart] = []
        """Those that have run in the last step."""

        self.rows = self.rows_of(trainer)
        """How rows run: packed, or padded."""

        self.row_size = RowSize(first_row(trainer.args.device.type))
        """Tokens of packed completions that run at once, of those that fit."""

        self._trainer, self.ranks = trainer, Ranks(trainer.args.device)
        self.timer: ForwardTimer[RowsPart] = ForwardTimer(
            trainer.args.device, lambda part, seconds: self.row_size.observe(part.tokens, seconds)
        )
        """Of parts that are learned from."""
        self._work = CompletionsWork(self, trainer.args.device)
        self._forward_work = self.forward_work(self, trainer.args.device)  # what runs without a gradient
        self._parallel = DataParallel(self.ranks, self.parameters)
        recovers = settings.recover_from_oom is not False
        self._runner = StepRunner(self._work, self._parallel, recovers=recovers)
        self._forward_runner = StepRunner(self._forward_work, recovers=recovers)
        self._prompts_at_once: int | None = None  # that are generated from; None for all
        self._generated_again: list[tuple[str, int | None]] = []  # and not yet taken
        self._num_generations_again = 0
        self._wrapped: nn.Module | None = None
        self._model: Any = None  # as it is called, without DDP
        self._is_ready = self._rows_depend = False
        self._batches: list[PreparedBatch] = []  # of the step so far

    def __str__(self) -> str:
        given = ", ".join(f"{name}={value}" for name, value in self.given.items())
        if not self._is_ready:
            return f"{given}; the token budget is determined when training begins"
        most = "any number of" if self.max_tokens is None else f"at most {self.max_tokens}"
        how = "packed without padding" if self.rows.packed else "padded"
        return f"{given}; completions are {how}, with {most} tokens in a forward pass"

    @property
    def num_recoveries(self) -> int:
        """Number of times that completions have had to run, or to be generated, again."""
        in_parts = self._work.limit.num_recoveries + self._forward_work.limit.num_recoveries
        return in_parts + self._num_generations_again

    def take_recovered(self) -> list[tuple[str, int | None]]:
        """Return what has run out of memory since the last call, in words, each with the limit after it."""
        again, self._generated_again = self._generated_again, []
        return [*again, *self._forward_runner.take_recovered(), *self._runner.take_recovered()]

    @property
    def max_tokens(self) -> int | None:
        """Tokens that a forward pass holds at most; None for any number."""
        return self._work.limit.max_tokens

    @property
    def rule(self) -> SplitRule:
        """How rows are split while memory suffices."""
        size = self.settings.micro_batch_size
        if isinstance(size, Fixed):
            return SplitRule(size.samples, is_even=False)
        return SplitRule(by_length=isinstance(size, ByLength))

    def parameters(self) -> list[nn.Parameter]:
        """Return all that have gradients."""
        optimizer = self._trainer.optimizer
        return parameters_of(self._trainer.model, [] if optimizer is None else [optimizer])

    # A step

    def begin(self) -> None:
        """Forget the step that an earlier run was in as it ended, by an error, say."""
        self._batches, self._rows_depend = [], False
        self.timer.forget()

    def step(self, model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Keep a prepared batch; with the last of a step, leave the gradient of all in the parameters.

        Returns:
            The sum of the losses of the step, without a graph; 0 before its last batch.

        Raises:
            DoesNotFitError: If memory runs out with a single completion.
        """
        self._batches.append(PreparedBatch(inputs))
        loss = torch.zeros((), device=self._trainer.args.device)
        if self._trainer.accelerator.sync_gradients:
            batches, self._batches = self._batches, []
            self._call(model)
            self.timer.read()  # of the step before
            self.row_size.begin_step(self.ranks.gather)
            done = self._runner.step(batches)
            self._parallel.sum_gradients(1 / self.ranks.size)
            self.parts_of_step = [part for part, _ in done]
            leaves_out = len(batches) > 1 and self._trainer.args.logging_nan_inf_filter  # each, as Trainer does
            try:
                for batch in batches:
                    # With the last of a step TRL adapts the coefficient of its entropy.
                    self._trainer.accelerator.sync_gradients = batch is batches[-1]
                    with torch.no_grad():
                        of_batch = self._loss_of_all(batch, done)
                    loss = loss + (of_batch.where(of_batch.isfinite(), 0) if leaves_out else of_batch)
            finally:
                self._trainer.accelerator.sync_gradients = True
        return loss.detach().requires_grad_()  # of which Trainer's backward has nothing to compute

    def _loss_of_all(self, batch: PreparedBatch, done: Sequence[tuple[RowsPart, Any]]) -> torch.Tensor:
        """Return TRL's loss of a batch whose rows have all run, with its metrics, once."""
        with replaced(self._trainer, **{METHOD: returning(batch.found)}):
            loss: torch.Tensor = self._trainer._compute_loss(self._model, batch.inputs)
        return loss

    def _call(self, model: nn.Module) -> None:
        """Have parts call ``model`` without DDP, which may be compiled for that."""
        if self._wrapped is not model:
            self._wrapped, self._model = model, without_ddp(self._trainer, model)

    def forward_backward(self, part: RowsPart) -> Any:
        """Run rows of a prepared batch, and leave their share of its gradient if they are learned from."""
        trainer, rows = self._trainer, [row.index for row in part.samples]
        batch: PreparedBatch = part.samples[0].batch

        def some(model: Any, ids: Any, mask: Any, width: int, batch_size: Any = None, **more: Any) -> tuple[Any, ...]:
            values, rest = self.rows.run(model, batch, rows, **more)
            batch.note(rows, values, rest)
            return batch.with_graph(rows, values)

        known = {} if batch.entropy_mask is None else {"get_high_entropy_mask": returning(batch.entropy_mask)}
        with (
            uncounted(trainer),
            without_other_ranks(trainer),
            replaced(trainer, **{METHOD: some}, **known),
            self.rows.around(self._model, batch, rows),
            self.timer.around(part) if part.learns else torch.no_grad(),
        ):
            loss = trainer._compute_loss(self._model, batch.inputs)
            if part.learns and loss.requires_grad:
                self.backward(loss)

    def backward(self, loss: torch.Tensor) -> None:
        """Divide by the accumulation steps, unless TRL's loss already does, and run backward."""
        trainer = self._trainer
        divisor = 1 if trainer.loss_is_scaled_for_ga else trainer.current_gradient_accumulation_steps
        with torch.autocast(loss.device.type, enabled=False):
            trainer.accelerator.backward(loss / divisor)

    def rows_depend(self, batch: PreparedBatch) -> bool:
        """Return True if the gradient of a row depends on values of others, as with a quantile; no model runs."""
        # Until it does it is asked for each batch: a loss may change in training, and one batch need not show it.
        self._rows_depend = self._rows_depend or self._shows_dependence(batch)
        return self._rows_depend

    def _shows_dependence(self, batch: PreparedBatch) -> bool:
        trainer, generator, device = self._trainer, torch.Generator().manual_seed(0), batch.ids.device
        shape, at = (len(batch.ids), batch.width), [row.index for row in batch.rows][::2]
        old = batch.inputs.get("old_per_token_logps")
        center = torch.full(shape, -4.0) if old is None else old.float().cpu()
        own = [center + 0.1 * torch.rand(shape, generator=generator), 4 * torch.rand(shape, generator=generator)]
        # A row without an advantage has no gradient that could show it, and a clipped loss has none for one sign.
        inputs = {**batch.inputs, **{key: torch.ones_like(batch.inputs[key]) for key in _FACTORS & batch.inputs.keys()}}
        if "advantages" in inputs:
            inputs["advantages"][at[1::2]] = -1
        gradients = []
        for scale in (0.5, 2.0):
            leaves = [value[at].to(device).requires_grad_() for value in own]
            filled = [
                (scale * value).to(device).index_copy(0, torch.tensor(at, device=device), leaf)
                for leaf, value in zip(leaves, own, strict=True)
            ]
            method = returning((*filled, *[None] * self.rows.num_others))
            with (
                uncounted(trainer),
                without_other_ranks(trainer),
                replaced(trainer, **{METHOD: method}),
                torch.enable_grad(),
            ):
                loss = trainer._compute_loss(self._model, inputs)
            found = torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else ()
            gradients += [torch.cat([each.flatten() for each in found if each is not None] or [leaves[0].flatten()])]
        one, other = gradients
        return self.ranks.any(not torch.allclose(one, other, rtol=1e-4, atol=1e-9))

    def take_entropy_mask(self, batch: PreparedBatch) -> None:
        """Find which tokens have a high entropy among those of all ranks, whose rows have all run."""
        trainer = self._trainer
        if self.ranks.size == 1 or not hasattr(trainer, "get_high_entropy_mask"):
            return
        find = trainer.get_high_entropy_mask

        def keep(*args: Any, **kwargs: Any) -> Any:
            batch.entropy_mask = find(*args, **kwargs)
            return batch.entropy_mask

        of_all = {METHOD: returning(batch.found), "get_high_entropy_mask": keep}
        with uncounted(trainer), torch.no_grad(), replaced(trainer, **of_all):
            trainer._compute_loss(self._model, batch.inputs)

    # Without a gradient

    def token_values(
        self, model: nn.Module, ids: torch.Tensor, mask: torch.Tensor, width: int, at_once: int | None,
        more: Mapping[str, Any],
    ) -> tuple[Any, ...]:  # fmt: skip
        """Return what :data:`METHOD` does, of rows that run in parts, and again in smaller ones if memory runs out.

        Args:
            model: The policy or its reference.
            ids: Prompts and completions, [b, p + c].
            mask: Of their tokens.
            width: c.
            at_once: Rows that TRL would run in a forward pass; None for all.
            more: Other arguments.
        """
        prompt = ids.shape[1] - width
        batch = PreparedBatch({
            "prompt_ids": ids[:, :prompt], "prompt_mask": mask[:, :prompt],
            "completion_ids": ids[:, prompt:], "completion_mask": mask[:, prompt:],
        })  # fmt: skip
        limit, runner = self._forward_work.limit, self._forward_runner
        limit.bound = self._work.limit.max_tokens
        rule = SplitRule(at_once, is_even=False) if limit.bound is None else SplitRule(by_length=True)
        for part, (values, rest) in runner.step(Call(model, batch, rule, more)):
            batch.note([row.index for row in part.samples], values, rest)
        return batch.found

    def evaluated(self, model: nn.Module, inputs: Mapping[str, Any], stock: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the loss of a batch that is evaluated: TRL's own, whose values come from :meth:`token_values`."""
        return stock()

    def generate(self, generate: Callable[..., Any], prompts: Sequence[Any], *more: Any, **others: Any) -> Any:
        """Return completions of ``prompts``; if memory runs out, from fewer at once, with the same random state.

        Raises:
            DoesNotFitError: If memory runs out with a single prompt.
        """
        trainer, random_state = self._trainer, RandomState(self._trainer.args.device)
        if trainer.use_vllm or getattr(trainer, "use_transformers_continuous_batching", False):
            return generate(prompts, *more, **others)  # which divide the work themselves
        checkpointing = {
            module: module.gradient_checkpointing
            for module in trainer.model.modules()
            if hasattr(module, "gradient_checkpointing")
        }
        can_divide = not any(len(each) if isinstance(each, (dict, list)) else 0 for each in (*more, *others.values()))
        at_once = self._prompts_at_once or len(prompts)
        while True:
            starts = range(0, len(prompts), at_once)
            try:
                if not can_divide:
                    return generate(prompts, *more, **others)
                groups = [generate(prompts[at : at + at_once], *more, **others) for at in starts]
                return groups[0] if len(groups) == 1 else _joined(groups)
            except Exception as error:
                if not is_out_of_memory(error) or self.settings.recover_from_oom is False:
                    raise
                failure = error
            forget_frames(failure)
            for module, was in checkpointing.items():  # which TRL turns off to generate, and leaves off after an error
                module.gradient_checkpointing = was
            release_cached_memory(trainer.args.device)
            if at_once == 1 or not can_divide:
                raise DoesNotFitError(
                    f"out of memory while generating from {'one prompt' if at_once == 1 else 'prompts with images'}; "
                    "set a smaller max_completion_length, or bf16=True"
                ) from failure
            random_state.put_back()
            self._num_generations_again += 1
            self._generated_again.append((f"while generating from {at_once} prompts", None))
            self._prompts_at_once = at_once = -(-at_once // 2)
            log.warning("out of memory while generating; generating again from %d prompts at once", at_once)

    # Before the first step

    def get_ready(self, inputs: Any) -> None:
        """Find out how completions run, and how many tokens fit in a forward and backward, before any is generated.

        Raises:
            ConfigError: If the trainer or its prompts cannot run in parts.
            DoesNotFitError: If the longest prompt and completion do not fit.
        """
        if self._is_ready:
            return
        self._get_ready(inputs)
        self._is_ready = True  # last: after an error, another run is checked and probed again

    def _get_ready(self, inputs: Any) -> None:
        trainer = self._trainer
        # For a callback that adopts, TRL had not set all of its attributes.
        check_generating(trainer, self.settings, self.given)
        if any(each.get(name) is not None for each in inputs for name in ("image", "images")):
            raise ConfigError(
                f"prompts of {type(trainer).__name__} have images, which cannot be divided among completions; train on "
                "text alone, or without adaptive"
            )
        if not isinstance(self.settings.micro_batch_size, ByLength):
            return
        self._call(trainer.model_wrapped)
        if not self.settings.padding:
            self._pack()
        if getattr(trainer, "environment_factories", None) is not None:
            log.info("nothing is probed, as environments make the prompts; what runs out of memory runs again in parts")
            return
        prompts, *_ = trainer._tokenize_prompts(_long_prompts(trainer.train_dataset, inputs))
        longest = int(self.ranks.largest(max(map(len, prompts))))
        self.longest = length = longest + trainer.max_completion_length
        log.info("probing forward passes, of prompts of %d tokens and %d generated", longest, length - longest)
        start = time.perf_counter()
        self.probe = probe = self._find(longest, trainer.max_completion_length)
        self.waited = time.perf_counter() - start
        if probe.bound == "memory" or probe.enough is not None:
            self._work.limit.bound = (probe.enough or probe.batch_size) * length
        self._work.limit.note(probe.batch_size * length)

    def _pack(self) -> None:
        trainer = self._trainer
        vocabulary = trainer.model.config.get_text_config().vocab_size
        dtype = torch.bfloat16 if trainer.args.bf16 else torch.float16 if trainer.args.fp16 else None
        with uncounted(trainer):
            batch, whys = sample_batch(vocabulary, *_LOOKED_AT, trainer.args.device), []
            try:
                for model in self.models:
                    whys.append(self.rows.pack_if_alike(model, batch, [dtype] if dtype else []))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                raise DoesNotFitError.even_of_few(_LESS_MEMORY) from error
        why = next(filter(None, whys), None)
        self.rows.packed = self.ranks.all(why is None)
        if self.rows.packed:
            log.info("completions are packed without padding, and attention stays within each")
        else:
            log.info("completions are padded: %s", why or "another rank pads them")

    @property
    def models(self) -> list[nn.Module]:
        """Those that rows run through, of which each has to compute packed ones as padded ones."""
        return [self._model]

    def try_rows(self, batch: PreparedBatch, rows: Sequence[int]) -> None:
        """Run ``rows`` forward and backward as in training, for their memory."""
        with self.rows.around(self._model, batch, rows):
            (log_probabilities, *_), _ = self.rows.run(self._model, batch, rows, compute_entropy=True)
            assert log_probabilities is not None
            self._trainer.accelerator.backward(-log_probabilities.mean())

    @little_to_collect()
    def _find(self, prompt: int, completion: int) -> ProbeResult:
        """Return how many of the longest prompts and completions fit in a forward and backward."""
        trainer, model, device = self._trainer, self._model, self._trainer.args.device
        most = trainer.args.per_device_train_batch_size
        request = ProbeRequest(most, "the completions of a batch", rounds=False, coarse=True, in_parts=True)
        if self.rows.packed:  # whose size is learnt in training
            suffices = -(-first_row(device.type) // (prompt + completion))
            request = replace(request, may_stop_early=True, suffices=suffices)

        def make_batch(size: int) -> PreparedBatch:
            # One is shorter, as models of transformers make a mask where there is padding, and without it none.
            return sample_batch(2, [prompt] * size, [completion] * (size - 1) + [max(completion - 1, 1)], device)

        def run(batch: PreparedBatch) -> None:
            rows = [row.index for row in batch.rows]
            for _ in range(2):  # the second holds the gradients of the first, as in training
                with trainer.compute_loss_context_manager():
                    self.try_rows(batch, rows)
            clip_and_step(model, [trainer.optimizer.optimizer], trainer.args.max_grad_norm or math.inf)

        step = TrainingStep(model, [trainer.optimizer.optimizer], make_batch, run, state=State([model]))
        with uncounted(trainer), replaced(trainer.accelerator, scaler=None):
            return find_largest(
                step, self.settings, memory_meter(device), request, ranks=self.ranks, times=ForwardTimes(),
                remedy=f"set {_LESS_MEMORY}", scratch=Path(trainer.args.output_dir),
            )  # fmt: skip


class AdaptiveGeneration:
    """Mixed into a class of trainers that generate, before it."""

    adaptive: GeneratedRun | None = None
    """The adaptive run; None if TRL trains by itself."""

    _recording: GeneratedRecording

    # Set by Trainer
    args: Any
    model: Any
    state: Any
    _get_output_dir: Callable[..., str]

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        stock = super().train  # type: ignore[misc]
        if self.adaptive is None:
            return stock(resume_from_checkpoint, *args, **kwargs)
        with self._recording.of_training(resumed=bool(resume_from_checkpoint)):
            return stock(resume_from_checkpoint, *args, **kwargs)

    def set_initial_training_values(self, *args: Any, **kwargs: Any) -> Any:
        if self.adaptive is not None:
            self.adaptive.begin()
        return super().set_initial_training_values(*args, **kwargs)  # type: ignore[misc]

    def _prepare_inputs(self, inputs: Any) -> Any:
        if self.adaptive is not None and self.model.training:
            try:
                self.adaptive.get_ready(inputs)
            except AdaptiveBatchingError as error:
                if not self.adaptive.only_if_possible:
                    raise
                log.warning("%s trains without adaptive batching: %s", type(self).__name__, first_line(error))
                self.adaptive = None
                self._recording.drop()
            self._recording.found()
        return super()._prepare_inputs(inputs)  # type: ignore[misc]

    def _generate_single_turn(self, prompts: Any, *args: Any, **kwargs: Any) -> Any:
        stock = super()._generate_single_turn  # type: ignore[misc]
        if self.adaptive is None:
            return stock(prompts, *args, **kwargs)
        return self.adaptive.generate(stock, prompts, *args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.adaptive is not None and self.model.training:
            return self.adaptive.step(model, inputs)
        stock = partial(super().compute_loss, model, inputs, *args, **kwargs)  # type: ignore[misc]
        return cast("torch.Tensor", stock() if self.adaptive is None else self.adaptive.evaluated(model, inputs, stock))

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **kwargs)  # type: ignore[misc]
        if self.adaptive is not None:
            self._recording.ran(loss)
        return loss

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)  # type: ignore[misc]
        if self.adaptive is not None and not self.args.save_only_model:
            checkpoint = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
            save_completions(self, checkpoint, self.adaptive.ranks)

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if self.adaptive is not None and checkpoint is not None:
            load_completions(self, Path(checkpoint), self.adaptive.ranks)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if self.adaptive is not None and "loss" in logs:
            logs["oom_retries"] = self.adaptive.num_recoveries
            self._recording.flush(waits=True)  # Trainer has just waited for the device, for the mean loss
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


class AdaptiveScoring(AdaptiveGeneration):
    """The same for a class whose loss is computed from log-probabilities."""

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, batch_size: Any = None, **more: Any
    ) -> Any:
        if self.adaptive is None:
            stock = super()._get_per_token_logps_and_entropies  # type: ignore[misc]
            return stock(model, input_ids, attention_mask, logits_to_keep, batch_size, **more)
        return self.adaptive.token_values(model, input_ids, attention_mask, logits_to_keep, batch_size, more)


def check_generating(trainer: Any, settings: AdaptiveBatchingConfig, given: Mapping[str, Any]) -> None:
    """Raise ConfigError if a trainer that generates cannot run its batches in parts, or a setting has no effect."""
    name = type(trainer).__name__
    if not all(hasattr(trainer, needed) for needed in ("loss_is_scaled_for_ga", "_tokenize_prompts")):
        raise ConfigError(
            f"{name} of this version cannot run in parts; update to TRL 1.16 and transformers 5.19 or later, or train "
            "without adaptive"
        )
    check_parallelism(trainer)
    if trainer.is_fsdp_enabled:
        raise ConfigError(f"{name} with FSDP gathers a model to generate; train on one device, or with DDP (torchrun)")
    if settings.resizes:
        raise ConfigError(
            f"a batch of {name} has groups of completions whose rewards are compared, so that its size stays; leave "
            "out use_maximum_batch_size and batch_increase_function, and set micro_batch_size='auto'"
        )
    if others := [key for key in given if key not in _SETTINGS]:
        raise ConfigError(
            f"{others[0]}={given[others[0]]!r} has no effect in {name}, whose batch stays as it is; leave it out"
        )
    if getattr(trainer, "aux_loss_enabled", False):
        raise ConfigError(
            "router_aux_loss_coef adds a router's auxiliary (load-balancing) loss, which uses statistics of the whole "
            "batch; set it to 0, or train without adaptive"
        )
    if getattr(trainer, "use_liger_kernel", False) or getattr(trainer, "use_liger_loss", False):
        raise ConfigError("the loss of Liger computes log-probabilities itself; set use_liger_kernel=False")
    owner = owner_of_method(type(trainer), "compute_loss")
    if scores_completions(type(trainer)) and vars(owner)["compute_loss"].__module__.partition(".")[0] != "trl":
        raise ConfigError(
            f"{owner.__name__} has a compute_loss of its own, which parts do not call: they run _compute_loss, for "
            "some completions at a time; override _compute_loss instead, or train without adaptive"
        )


@contextlib.contextmanager
def without_other_ranks(trainer: Any) -> Iterator[None]:
    """Have nothing of a loss wait for other ranks inside, which run their parts at other times."""

    def unpadded(value: Any, *args: Any, **kwargs: Any) -> Any:
        return value

    with without_gathering(trainer), replaced(trainer.accelerator, pad_across_processes=unpadded):
        yield


@contextlib.contextmanager
def uncounted(trainer: Any) -> Iterator[None]:
    """Let nothing stay of what a loss counts for logs, or adapts, as TRL's coefficient of the entropy."""
    own = vars(trainer)
    before = dict(own)
    own["_metrics"] = {mode: collections.defaultdict(list) for mode in trainer._metrics}
    try:
        yield
    finally:
        for name in own.keys() - before.keys():
            del own[name]
        own.update(before)


def returning(value: Any) -> Callable[..., Any]:
    """Return a function that returns ``value``, whatever it is called with."""
    return lambda *args, **kwargs: value


def _long_prompts(data: Any, inputs: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return those prompts of the data that have the most characters; of a stream, of the first batch alone."""
    prompts: Iterable[Any] = (each["prompt"] for each in inputs)
    if hasattr(data, "__len__"):  # else it is an IterableDataset; TRL takes nothing but these two
        batches = data.select_columns("prompt").iter(_READ_AT_ONCE)
        prompts = itertools.chain(prompts, (prompt for batch in batches for prompt in batch["prompt"]))
    return heapq.nlargest(_TOKENIZED, prompts, key=lambda prompt: len(str(prompt)))


def _joined(groups: Sequence[Sequence[Any]]) -> Sequence[Any]:
    """Return what was generated from several groups of prompts as from all of them: a list, or several, or nothing."""
    if isinstance(groups[0], list):
        return [each for group in groups for each in group]
    joined: list[Any] = []
    for values in zip(*groups, strict=True):
        is_list = all(isinstance(value, list) for value in values)
        joined.append([each for value in values for each in value] if is_list else values[0])
    return tuple(joined)
