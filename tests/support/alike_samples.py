"""Samples of one length, as packed data has, of which few fit under a real memory limit: hosts train as without it.

    python -m tests.support.alike_samples <host> '[[<samples that fit>, <the most of a part, or null>], ...]'

prints a line for each case, which runs in a fork of this process: losses, and how often memory ran out. The first line
has the losses without a limit, of one sample at a time.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from adaptive_batching import AdaptiveStep, memory_meter
from adaptive_batching._memory.host_limits import status
from adaptive_batching._memory.out_of_memory import is_out_of_memory
from tests.conftest import ROOT
from tests.support.environment import TAME_MALLOC
from tests.support.garbage import quicken_collections
from tests.support.steps import most_in_use

VOCABULARY, LENGTH, BATCH, STEPS = 32_000, 40, 8, 2
ROOM = 0.3  # for what a part has besides, of what a sample takes
DATA = [torch.randint(1, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(n)) for n in range(16)]

Trained = tuple[list[float], int]
"""The losses of steps, and how often samples ran again."""


def trained_alike(host: str, cases: list[tuple[int, int | None]]) -> tuple[list[float], list[dict[str, Any]]]:
    """Return the losses of ``host`` without a limit, and what came of each case with one."""
    done = subprocess.run(
        [sys.executable, "-m", __name__, host, json.dumps(cases)],
        cwd=ROOT, env={**os.environ, **TAME_MALLOC}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    expected, *found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("[", '{"'))]
    return expected, found


class Loop:
    """A plain loop."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY))

    def forward_backward(self, num_samples: int) -> None:
        total, number = self.loss(self.model, torch.stack(DATA[:num_samples]))
        (total / number).backward()

    @staticmethod
    def loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        targets = batch[:, 1:]
        logits = model(batch[:, :-1]).flatten(0, 1)
        return cross_entropy(logits, targets.flatten(), reduction="sum"), targets.numel()

    def train(self, most: int | None, limit: Callable[[], None]) -> Trained:
        step = AdaptiveStep(self.model, torch.optim.SGD(self.model.parameters(), lr=1.0), self.loss, length=len)
        step.max_tokens = None if most is None else most * LENGTH
        limit()
        return [step(DATA[at : at + BATCH]).item() for at in range(0, STEPS * BATCH, BATCH)], step.num_recoveries


class OfTrainer:
    """Hugging Face's Trainer."""

    def __init__(self) -> None:
        from tests.transformers.trainers import make_llama

        self.model = make_llama(vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=1)

    def forward_backward(self, num_samples: int) -> None:
        self.model(**self.collate([{"input_ids": ids} for ids in DATA[:num_samples]])).loss.backward()

    @staticmethod
    def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        ids = torch.stack([torch.as_tensor(sample["input_ids"]) for sample in samples])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}

    def train(self, most: int | None, limit: Callable[[], None]) -> Trained:
        from adaptive_batching.transformers import AdaptiveArguments
        from tests.transformers.trainers import losses, make_trainer

        with tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(
                Path(folder), AdaptiveArguments(micro_batch_size=most or BATCH), model=self.model,
                collator=self.collate, data=[{"input_ids": ids.tolist()} for ids in DATA],
                max_steps=STEPS, optim="sgd", learning_rate=1.0, warmup_steps=0,
            )  # fmt: skip
            limit()
            trainer.train()
        return [each["loss"] for each in losses(trainer)], trainer.adaptive.num_recoveries


HOSTS: dict[str, Any] = {"loop": Loop, "trainer": OfTrainer}


def limit_to(num_bytes: int) -> None:
    """Let this process take so much more."""
    memory_meter("cpu").release()
    resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + num_bytes, -1))


def runs_out_of_memory(run: Callable[[], object]) -> bool:
    try:
        run()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return True
    return False


def main(host: Any, cases: list[tuple[int, int | None]]) -> None:
    print(json.dumps(host().train(1, lambda: None)[0]), flush=True)
    own = host()
    own.forward_backward(1)  # parts have the gradient of those before beside them
    sizes = range(1, 1 + max(num_fits for num_fits, _ in cases))
    peaks = {size: most_in_use(partial(own.forward_backward, size)) for size in sizes}
    gradients = sum(parameter.nbytes for parameter in own.model.parameters())
    of_one_more = peaks[1] if len(peaks) == 1 else (peaks[len(peaks)] - peaks[1]) / (len(peaks) - 1)
    for num_fits, most in cases:
        if os.fork():
            os.wait()
            continue
        allowed = int(peaks[num_fits] + ROOM * of_one_more)
        limit_to(allowed)
        fit = [not runs_out_of_memory(partial(own.forward_backward, size)) for size in (num_fits, num_fits + 1)]
        resource.setrlimit(resource.RLIMIT_DATA, (-1, -1))
        try:
            losses, recoveries = host().train(most, partial(limit_to, allowed + gradients))
            told = {"case": (num_fits, most), "fit": fit, "losses": losses, "recoveries": recoveries}
            print(json.dumps(told), flush=True)
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(0)  # an interpreter that ends in the ordinary way may wait for memory


if __name__ == "__main__":
    quicken_collections()
    main(HOSTS[sys.argv[1]], json.loads(sys.argv[2]))
