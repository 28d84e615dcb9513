"""Growth and resume within real recipes, run through ``tune run``."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from adaptive_batching._memory.meter import CpuMeter
from adaptive_batching._torchtune.train.run import TrainingLoop
from tests.conftest import TuneRun, assert_close, assert_same_weights
from tests.integration.faults import shapes_of_forwards
from tests.support.overrides import DOUBLE, SGD
from tests.support.power_cut import FUNCTION
from tests.support.records import events
from tests.support.wide import few

BOUND = ["adaptive_batching.max_batch_size=16"]


def doubles(epoch: int, current_batch_size: int) -> int:
    return current_batch_size if epoch else 0


def test_the_batch_follows_the_function_and_everything_follows_the_batch(
    tune_run: TuneRun, caplog: pytest.LogCaptureFixture
) -> None:
    function = {"batch_increase_function": "tests.integration.test_growth.doubles"}
    run = tune_run("full", *BOUND, "epochs=4", "gradient_accumulation_steps=2", replaced=function)
    epochs = events(run, "epoch")
    assert [(e["batch_size"], e["steps"], e["samples"]) for e in epochs] == [
        (4, 6, 48), (8, 3, 48), (16, 1, 32), (16, 1, 32),
    ]  # fmt: skip
    assert [e["global_batch_size"] for e in epochs] == [8, 16, 32, 32]
    assert [s["batch_size"] for s in run.metrics] == [4] * 6 + [8] * 3 + [16] * 2
    assert [s["global_batch_size"] for s in run.metrics] == [8] * 6 + [16] * 3 + [32] * 2
    warnings = [r.getMessage() for r in caplog.records if "batch size stays at 16" in r.getMessage()]
    assert len(warnings) == 1 and "32" in warnings[0] and "max_batch_size=16" in warnings[0]


def test_growth_under_optimizer_in_backward_and_max_steps(tune_run: TuneRun) -> None:
    in_backward = ["optimizer_in_bwd=True", "clip_grad_norm=null", "max_steps_per_epoch=2"]
    run = tune_run("full", *DOUBLE, *BOUND, *in_backward, "lr_scheduler.num_warmup_steps=1")
    assert [s["batch_size"] for s in run.metrics] == [4, 4, 8, 8]
    assert run.metrics[-1]["lr"] == 0.0


@pytest.mark.parametrize(("micro_batch_size", "batch_size"), [(3, 15), (40, 16)])
def test_a_maximum_is_a_multiple_of_the_micro_batch_size(
    micro_batch_size: int, batch_size: int, tune_run: TuneRun, caplog: pytest.LogCaptureFixture
) -> None:
    common = ["batch_size=2", "use_maximum_batch_size=True", "adaptive_batching.max_batch_size=16", "epochs=1"]
    run = tune_run("full", *common, f"micro_batch_size={micro_batch_size}", "adaptive_batching.memory_limit=8GiB")
    assert {step["batch_size"] for step in run.metrics} == {batch_size}
    assert ("micro_batch_size=40 does not fit; using the maximum, 16" in caplog.text) == (micro_batch_size == 40)


def test_the_global_batch_stays_where_it_is_to_be_kept(tune_run: TuneRun) -> None:
    """What batch_size gains, accumulation loses: losses, rates and weights are those of the constant run."""
    common = [*SGD, "epochs=4", "batch_size=2", "gradient_accumulation_steps=8", "dataset.split=train[:48]"]
    constant = tune_run("full", *common, *DOUBLE, "adaptive_batching.max_batch_size=2", name="constant")
    kept = tune_run("full", *common, *DOUBLE, "adaptive_batching.keep_global_batch=True", *BOUND, name="kept")
    assert [(s["batch_size"], s["global_batch_size"]) for s in kept.metrics[::3]] == [(n, 16) for n in (2, 4, 8, 16)]
    assert [e["steps"] for e in events(kept, "epoch")] == [3] * 4
    assert_close(kept, constant, epoch=3)


@pytest.mark.wide
@pytest.mark.serial
def test_growth_beyond_memory_accumulates_what_does_not_fit(tune_run: TuneRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forwards stay within what was found to fit, the gradients are those of the whole batch."""
    model = "model._component_=tests.integration.faults.counting_model"
    few = [*SGD, model, "dataset.split=train[:130]", "tokenizer.max_seq_len=128", "epochs=2", "batch_size=64"]
    whole = tune_run("full", *few, *DOUBLE, "adaptive_batching.max_batch_size=128", name="whole")
    meter = CpuMeter()
    meter.release()
    limit = f"adaptive_batching.memory_limit={meter.used_bytes() + 200 * 2**20}"
    beyond = [limit, "adaptive_batching.max_batch_size=128", "adaptive_batching.grow_beyond_memory=True"]
    run = TrainingLoop.run

    def run_and_count(self: TrainingLoop) -> None:
        shapes_of_forwards.clear()
        run(self)

    monkeypatch.setattr(TrainingLoop, "run", run_and_count)
    grown = tune_run("full", *few, *DOUBLE, *beyond, name="grown")
    [probe] = events(grown, "probe")
    assert 20 < probe["batch_size"] < 100
    assert [e["batch_size"] for e in events(grown, "epoch")] == [64, 128]
    trained = shapes_of_forwards
    assert max(rows for rows, _ in trained) <= probe["batch_size"]
    assert sum(rows for rows, _ in trained) == 2 * 128
    assert_close(grown, whole, epoch=1)


FIRST = "checkpointer.checkpoint_files=[epoch_1/model-00001-of-00001.safetensors]"
RESUME = ["resume_from_checkpoint=True"]


@pytest.mark.parametrize("kind", few(["full", "lora", "lora_dpo", "kd"], "full"))
def test_a_resumed_run_equals_the_uninterrupted_one(
    kind: str, tune_run: TuneRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Batches, learning rates, losses and weights, dropout included; with the result of the probe in the checkpoint."""
    common = ["epochs=4", "use_maximum_batch_size=True", "adaptive_batching.memory_limit=8GiB", *FUNCTION]
    common += [] if kind == "full" else ["model.lora_dropout=0.1"]
    whole = tune_run(kind, *common, name="whole", cut_off_at=2)
    whole.copy_when_cut_off(tmp_path / "again")
    caplog.set_level(logging.INFO, "adaptive_batching")
    caplog.clear()
    (tmp_path / "again" / "adaptive_batching" / "probe.json").unlink()
    resumed = tune_run(kind, *common, *RESUME, *([FIRST] if kind == "full" else []), name="again")
    assert "from the checkpoint's probe" in caplog.text and "trial 1" not in caplog.text
    assert resumed.metrics == whole.metrics
    assert_same_weights(resumed.weights(epoch=3), whole.weights(epoch=3))
    epochs = events(resumed, "epoch")
    assert [(e["epoch"], e["batch_size"]) for e in epochs] == [(0, 4), (1, 8), (2, 16), (3, 32)]
