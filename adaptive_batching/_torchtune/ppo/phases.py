"""The probe of PPO: rollouts and backward passes each have a peak of their own, and a largest size of their own."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._memory import MemoryMeter, release_cached_memory
from adaptive_batching._probe.does_not_fit import Remedy
from adaptive_batching._probe.find import Question, find_largest
from adaptive_batching._probe.sizes import ProbeResult
from adaptive_batching._report.record import Report
from adaptive_batching._torchtune.host import Host, StockRun
from adaptive_batching._torchtune.objective import worst_case_sample
from adaptive_batching._torchtune.ppo.stock_ppo import StockPPO
from adaptive_batching._torchtune.ppo.trajectories import Trajectories, bytes_of, longest
from adaptive_batching._torchtune.probing import Circumstances, Probe, Probed, kept_probe, upper_bound
from adaptive_batching._trace.training import TrainingStep

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProbedSizes:
    batch: Probed
    """Of a batch of trajectories, and of a backward pass."""

    rollout_rows: int | None = None
    """Trajectories that fit in a forward of a rollout; None where no probe has run."""


def find_sizes(
    host: Host,
    stock: StockPPO,
    run: StockRun,
    settings: AdaptiveBatchingConfig,
    circumstances: Circumstances,
    report: Report,
) -> ProbedSizes:
    """Find the largest batch of trajectories of a run, and what fits in a forward of each phase.

    A batch that is not cut is as many backward passes as the config has in one, each of the largest size. Results are
    kept in the folder of ``report`` for the next run.
    """
    parts = stock.sizes.parts
    upper, reason = upper_bound(host, run, settings)
    upper = upper // parts * parts
    if not settings.probes:
        report.maximum(upper, reason)
        return ProbedSizes(Probed(upper, reason, settings.micro_batch_size))
    objective, folder = host.objective, report.directory
    assert isinstance(objective, Trajectories)
    prompt = worst_case_sample(
        host.loader.dataset,
        objective,
        sequence_length=settings.sequence_length,
        tokenizer_max=host.max_length,
        model_max=stock.longest_prompt,
    )
    length = len(objective.tokens(prompt))
    generated = stock.max_generated_tokens
    row_bytes = bytes_of(longest(stock, length))
    # Is the batch as many backward passes of the size that is found as the config has in one?
    follows = settings.growth_is_bound_by_memory if settings.grows else settings.use_maximum_batch_size
    worst = objective.at_worst(length, lambda rows: (rows * parts if follows else upper) * row_bytes)
    [sample] = worst.rows([0])
    of_backward = replace(run, batch_size=run.batch_size // parts, accumulation=stock.sizes.backwards)
    log.info("probing backward passes, of prompts of %d tokens and %d generated", length, generated)
    as_worst = replace(host, objective=worst)
    probe = Probe(as_worst, of_backward, settings, circumstances, sample, upper // parts, reason, folder)
    result = probe.result()
    report.probe(result, sequence_length=len(worst.tokens(sample)), of="most in a backward")
    found = probe.probed(result)
    batch = replace(found, maximum=found.maximum * parts)
    rollouts = _Rollouts(stock, length, batch.maximum if follows else upper, row_bytes)
    rollout = rollouts.probe(host, settings, circumstances, folder)
    report.rollout(rollout, prompt_length=length, generated=generated)
    return ProbedSizes(batch, rollout.batch_size)


@dataclass(frozen=True)
class _Rollouts:
    """Rollouts of prompts as long as can be."""

    stock: StockPPO
    prompt_tokens: int
    most_rows: int
    """Trajectories of the largest batch, all of which are held."""

    row_bytes: int

    def probe(
        self, host: Host, settings: AdaptiveBatchingConfig, circumstances: Circumstances, folder: Path
    ) -> ProbeResult:
        """Find the most trajectories that fit in a forward while the largest batch is held."""
        log.info("probing rollouts of these lengths")
        step = self._step(host)
        remedies = [
            Remedy(f"max_generated_tokens below {self.stock.max_generated_tokens}"),
            Remedy(f"tokenizer.max_seq_len below {self.prompt_tokens}"),
        ]

        def find(settings: AdaptiveBatchingConfig, meter: MemoryMeter) -> ProbeResult:
            question = Question(
                self.most_rows, "the largest batch", coarse=True, remedies=lambda: remedies, scratch=folder
            )
            settings = replace(settings, round_to_power_of_two=False)  # rows of a forward are no size of training
            return find_largest(step, settings, meter, question)

        facts = {"recipe": f"{host.name}, rollout", "upper": self.most_rows, "sequence_length": self.prompt_tokens}
        return kept_probe(host, settings, circumstances, facts, folder / "probe_rollout.json", find)

    def _step(self, host: Host) -> TrainingStep:
        """Return a rollout to measure. It is not traced: that takes as long as to run it, token by token."""
        stock = self.stock

        def make_batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
            token = 1 if stock.pad_id == 0 else 0
            prompts = torch.full((rows, self.prompt_tokens), token, device=stock.device)
            if self.prompt_tokens > 1:
                prompts[0, 0] = stock.pad_id  # with padding anywhere, each row has an attention mask of its own
            return prompts, torch.empty(self.most_rows * self.row_bytes, dtype=torch.uint8, device=stock.device)

        def run(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
            with stock.unchanged_draws():
                stock.generate(batch[0])

        def discard() -> None:
            stock.forget()
            release_cached_memory(host.device)

        return TrainingStep(host.model, host.optimizers, make_batch, lambda *_: run, discard, can_be_traced=False)
