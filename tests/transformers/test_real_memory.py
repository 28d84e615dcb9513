"""Trainer under a real memory limit: a long sample in the middle ends nothing, and what is probed fits.

As a program it trains twice from the same start, freely and with 60 MiB that the process may still take after the first
step, and prints the losses of both runs, and how often each ran out of memory.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra transformers)")

from adaptive_batching import memory_meter  # noqa: E402
from adaptive_batching._memory import _status  # noqa: E402
from adaptive_batching.transformers import AdaptiveArguments  # noqa: E402
from tests.conftest import ROOT  # noqa: E402
from tests.support.environment import TAME_MALLOC  # noqa: E402
from tests.support.garbage import quicken_collections  # noqa: E402
from tests.transformers import trainers  # noqa: E402

ALLOWED = 60 * 2**20


@pytest.mark.serial
def test_a_long_sample_does_not_end_a_run_and_changes_no_loss() -> None:
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        cwd=ROOT, env={**os.environ, **TAME_MALLOC}, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    free, limited = json.loads(done.stdout.splitlines()[-1])
    assert free["recoveries"] == 0
    assert limited["recoveries"] >= 1, "the limit was met"
    assert limited["losses"] == pytest.approx(free["losses"], rel=1e-4)


class Limit(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Sets the limit once the optimizer has its states."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            memory_meter("cpu").release()
            resource.setrlimit(resource.RLIMIT_DATA, (_status("VmData") + ALLOWED, -1))


def train(*, limited: bool) -> dict[str, Any]:
    data = trainers.make_data(64)
    long = [1 + number % (trainers.VOCABULARY - 1) for number in range(480)]
    data[40] = {"input_ids": long, "labels": long}
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainers.make_trainer(
            Path(folder), AdaptiveArguments(micro_batch_size=16), data=data, per_device_train_batch_size=16,
            model=trainers.make_llama(hidden_size=128, intermediate_size=512), num_train_epochs=1,
            train_sampling_strategy="sequential", callbacks=[Limit()] if limited else [],
        )  # fmt: skip
        trainer.train()
    losses = [each["loss"] for each in trainers.logged(trainer) if "loss" in each]
    return {"losses": losses, "recoveries": trainer.adaptive.num_recoveries}


if __name__ == "__main__":
    quicken_collections()
    print(json.dumps([train(limited=False), train(limited=True)]))
