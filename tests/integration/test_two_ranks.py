"""The distributed recipes on two processes of one machine; see ``two_ranks.py`` for the runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torchtune.modules.peft import LoRALinear

from adaptive_batching._torchtune.train.loop import TrainingLoop
from tests.conftest import ROOT, Run, TuneRun, assert_close, assert_same_weights, small_run
from tests.integration.one_target import NOISE, truth
from tests.integration.two_ranks import FAULTS, KINDS, OTHERS, SHARED, SHARED_FAULTS, of_shared_steps, same_everywhere
from tests.support.html import read_page
from tests.support.launches import Finished, of_launch, output_of
from tests.support.overrides import SGD, VALIDATE, WIDE
from tests.support.ranks import free_port
from tests.support.records import events, without_sizes


def assert_as_stock(finished: Finished, name: str) -> None:
    ours, stock = finished(f"{name}_off"), finished(f"{name}_stock")
    assert len(stock.metrics) >= 2
    assert ours.metrics == stock.metrics
    assert_same_weights(ours.weights(0), stock.weights(0))


def assert_validated_as_one_by_one(
    kind: str, finished: Finished, launched: tuple[Path, str], rel: float = 1e-6
) -> list[float]:
    """Runs in small forwards, and in large ones of which one runs out of memory; return the losses of the former."""
    losses = []
    off = finished(f"{kind}_off")
    for name in (f"{kind}_validated", f"{kind}_validated_again"):
        logged = finished(name).metrics
        assert [step for step in logged if "val_loss" not in step] == off.metrics
        assert_same_weights(finished(name).weights(0), off.weights(0))
        losses.append([step["val_loss"] for step in logged if "val_loss" in step])
        assert "not always the same" not in output_of(launched, name), "training could still recover"
    assert len(losses[0]) == len(off.metrics)
    assert losses[1] == pytest.approx(losses[0], rel=rel)
    assert output_of(launched, name).count("running samples of dataset_val again") == 1, "one rank says so"
    return losses[0]


EACH_KIND = pytest.mark.parametrize("kind", KINDS)


@of_launch("as_stock")
@EACH_KIND
def test_off_is_stock(kind: str, finished: Finished) -> None:
    assert_as_stock(finished, kind)


@of_launch("as_stock")
def test_ranks_validate_each_sample_once_and_train_as_without(
    finished: Finished, launched: tuple[Path, str], tune_run: TuneRun
) -> None:
    """Eleven samples, of which one rank has more; the first step has a rate of 0, so its loss is that of one device."""
    one_device = tune_run("full", "epochs=1", "max_steps_per_epoch=1", *VALIDATE, "run_val_every_n_steps=1")
    losses = assert_validated_as_one_by_one("full", finished, launched)
    assert losses[0] == pytest.approx(one_device.metrics[1]["val_loss"], rel=1e-6)


@of_launch("split")
@EACH_KIND
def test_two_ranks_train_as_one_device_on_the_same_samples(
    kind: str, finished: Finished, tune_run: TuneRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoRALinear, "initialize_parameters", same_everywhere)
    one = tune_run(kind, *SGD, "batch_size=8", "gradient_accumulation_steps=2", "epochs=1",
                   f"dataset.split=train[:{16 * len(FAULTS)}]", "lr_scheduler.num_warmup_steps=2")  # fmt: skip
    assert_close(finished(f"{kind}_whole"), one, epoch=0)


@of_launch("split")
@EACH_KIND
@pytest.mark.parametrize("size", ["2", "auto"])
def test_however_the_ranks_cut_they_train_as_the_whole_batch(kind: str, size: str, finished: Finished) -> None:
    split, whole = finished(f"{kind}_cut_{size}"), finished(f"{kind}_whole")
    pairs = [(weights, split.weights(0)[name]) for name, weights in whole.weights(0).items()]
    assert not all(torch.equal(*pair) for pair in pairs), "rounding tells that batches were split"
    assert_close(split, whole, epoch=0)
    if size == "auto":
        assert events(split, "probe")[0]["enough"] == 8, "what a rank has in a step"


@of_launch("split")
@EACH_KIND
def test_a_rank_that_runs_out_of_memory_loses_and_repeats_nothing(
    kind: str, finished: Finished, launched: tuple[Path, str]
) -> None:
    recovered = finished(f"{kind}_recovered")
    assert_close(recovered, finished(f"{kind}_whole"), epoch=0)
    assert [step["oom_retries"] for step in recovered.metrics] == [1, 2, 3, 4, 5, 6, 8]
    said = re.findall(r"out of memory (.*); running the step's samples again", output_of(launched, f"{kind}_recovered"))
    on = [re.findall(r"on rank (\d) with \d samples? of up to \d+ tokens", each) for each in said]
    expected = [list(map(str, fault["on"])) for fault in FAULTS.values()]
    assert on == [*expected, expected[-1]], "one rank says so, for all"


@of_launch("recovery")
@pytest.mark.parametrize(("name", "recoveries"), [("checkpointing", 2), ("offload", 1)])
def test_recovery_with_activation_checkpointing_and_with_parameters_on_the_host(
    name: str, recoveries: int, finished: Finished
) -> None:
    recovered = finished(name)
    assert recovered.metrics[-1]["oom_retries"] == recoveries
    assert_close(recovered, finished("whole"), epoch=0)


@of_launch("recovery")
def test_a_sample_that_fits_on_one_rank_alone_ends_the_run_on_all(launched: tuple[Path, str]) -> None:
    errors = [(launched[0] / "hopeless" / f"error_{rank}.txt").read_text() for rank in range(2)]
    assert re.search(r"out of memory with 1 sample of up to \d+ tokens, which cannot be split: number \d+", errors[1])
    assert "out of memory on another rank" in errors[0]
    page = launched[0] / "hopeless" / "adaptive_batching" / "report.html"
    words, latest = "", time.monotonic() + 60
    while words.count("DoesNotFitError on rank") < 2 and time.monotonic() < latest:  # no rank that fails waits for it
        time.sleep(0.1)
        words = read_page(page).words["error"] if page.exists() else ""
    assert "DoesNotFitError on rank 0" in words and "out of memory on another rank" in words
    assert "DoesNotFitError on rank 1" in words and errors[1].splitlines()[0].removeprefix("error: ") in words


@of_launch("recovery")
def test_where_recovery_is_off_the_run_ends_and_says_what_to_set(launched: tuple[Path, str]) -> None:
    error = (launched[0] / "not_to_recover" / "error_0.txt").read_text()
    assert error.startswith("error: out of memory in a forward or backward of 4 samples of up to")
    assert "set adaptive_batching.recover_from_oom=True" in error.splitlines()[0]


@of_launch("noise")
def test_the_noise_scale_is_right_on_two_ranks(
    finished: Finished, tune_run: TuneRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    truths = []
    monkeypatch.setattr(LoRALinear, "initialize_parameters", same_everywhere)
    monkeypatch.setattr(TrainingLoop, "run", lambda self: truths.append(truth(self._host)))
    tune_run("lora", *WIDE, *NOISE, "batch_size=5", "dataset._component_=tests.integration.one_target.OneTarget")
    measured = events(finished("lora_noise"), "noise")
    mean = [sum(event[key] for event in measured) / 30 for key in ("variance", "norm_squared")]
    assert mean == pytest.approx(list(truths[0]), rel=0.05)


@of_launch("noise")
def test_ranks_grow_together_by_what_they_measure_together(finished: Finished) -> None:
    run = finished("by_noise")
    sizes = [step["batch_size"] for step in run.metrics]
    assert sizes == sorted(sizes) and 4 == sizes[0] < sizes[-1] <= 12
    assert "gradient_noise_scale" in run.metrics[-1]


@of_launch("growth")
def test_a_function_that_answers_each_rank_otherwise_cannot_split_them(finished: Finished) -> None:
    assert [epoch["batch_size"] for epoch in events(finished("agreed"), "epoch")] == [4, 6, 8]


@of_launch("growth")
@pytest.mark.parametrize("name", ["full", "full_steps"])
def test_a_run_that_is_cut_off_goes_on_as_if_it_had_not_been(name: str, finished: Finished) -> None:
    """After an epoch, and within the second."""
    whole, resumed = finished(f"{name}_whole"), finished(name)
    if name == "full":
        assert [epoch["batch_size"] for epoch in events(resumed, "epoch")] == [4, 8, 16]
        assert resumed.metrics == whole.metrics
        assert_same_weights(resumed.weights(2), whole.weights(2))
        return
    assert [step["batch_size"] for step in whole.metrics] == [4] * 3 + [8] * 4
    assert [event["step"] for event in events(resumed, "resume")] == [5]
    assert len(resumed.metrics) == 6 + 2
    assert resumed.by_step == whole.by_step
    assert_same_weights(resumed.weights_in("step_7"), whole.weights_in("step_7"))


@of_launch("split")
def test_a_checkpoint_of_two_ranks_loads_on_one_device(launched: tuple[Path, str], tune_run: TuneRun) -> None:
    saved = launched[0] / "full_whole" / "epoch_0"
    run = tune_run("full", "epochs=1", f"checkpointer.checkpoint_dir={saved}",
                   "checkpointer.checkpoint_files=[model-00001-of-00001.safetensors]")  # fmt: skip
    assert run.metrics[0]["loss"] < Run(launched[0] / "full_whole").metrics[0]["loss"]


@of_launch("as_stock")
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("in_backward", "recovery from out-of-memory errors is off: optimizer_in_bwd=True"),
        ("tensor_parallel", "is off: tensor_parallel_dim above 1"),
    ],
)
def test_what_cannot_recover_trains_as_stock_and_says_so(
    name: str, why: str, finished: Finished, launched: tuple[Path, str]
) -> None:
    assert_as_stock(finished, name)
    assert why in output_of(launched, f"{name}_off")


@of_launch("as_stock")
def test_with_optimizers_in_the_backward_pass_several_devices_are_not_probed(launched: tuple[Path, str]) -> None:
    for rank in range(2):
        error = (launched[0] / "in_backward_probe" / f"error_{rank}.txt").read_text()
        assert "the largest batch cannot be probed on several devices: optimizer_in_bwd=True" in error


@of_launch("growth")
def test_the_global_batch_is_kept_on_two_ranks(finished: Finished) -> None:
    kept, constant = finished("kept"), finished("constant")
    assert {step["global_batch_size"] for step in kept.metrics} == {16}
    assert sorted({step["batch_size"] for step in kept.metrics}) == [2, 4, 8]
    assert_close(kept, constant, epoch=2)


def assert_close_weights(kind: str, ours: Run, theirs: Run) -> None:
    for name, weights in theirs.weights(0).items():
        if kind == "qat":  # rounding of sums can move a weight from one bin of the quantizer to the next
            far = (ours.weights(0)[name] - weights).abs() > 2e-4 + 1e-2 * weights.abs()
            assert far.float().mean() < 1e-3, name
        else:
            torch.testing.assert_close(ours.weights(0)[name], weights, rtol=1e-2, atol=2e-4)


@of_launch("others")
@pytest.mark.parametrize("kind", OTHERS)
def test_other_recipes_are_stock_when_off_and_survive_running_out_of_memory(
    kind: str, finished: Finished, launched: tuple[Path, str]
) -> None:
    """In a forward, a backward, and of preferences in a forward of the frozen model."""
    assert_as_stock(finished, kind)
    recovered, undisturbed = finished(f"{kind}_recovered"), finished(f"{kind}_stock")
    expected = [1, 2, 3] if kind.endswith("dpo") else [1, 2, 2]
    assert [step["oom_retries"] for step in recovered.metrics] == expected
    assert_close_weights(kind, recovered, undisturbed)
    rows = finished(f"{kind}_rows")
    assert rows.metrics[-1]["oom_retries"] == 2
    assert "cannot lie end to end" not in output_of(launched, f"{kind}_rows")
    assert_close_weights(kind, rows, finished("kd_padded") if kind == "kd" else undisturbed)


def assert_shared_out(run: Run, *, stops_after: int | None = None) -> None:
    """Samples have moved, up to a step, and in no step does the slowest rank take longer than with its own samples."""
    steps = events(run, "step")
    balances = [step["slowest_as_drawn"] - step["slowest"] for step in steps[:stops_after]]
    assert all(balance >= 0 for balance in balances) and any(step["moved"] for step in steps[:stops_after])
    if stops_after is not None:
        assert all(step["moved"] is None for step in steps[stops_after:])


def assert_same_training(ours: Run, theirs: Run, weights: str = "epoch_0") -> None:
    """Equal to float rounding: losses, learning rates, norms of gradients and weights."""
    assert ours.by_step.keys() == theirs.by_step.keys()
    for step, logged in theirs.by_step.items():
        for key in {"loss", "lr", "grad_norm", "val_loss"} & logged.keys() & ours.by_step[step].keys():
            assert ours.by_step[step][key] == pytest.approx(logged[key], rel=1e-5), (step, key)
    for name, expected in theirs.weights_in(weights).items():
        torch.testing.assert_close(ours.weights_in(weights)[name], expected, rtol=1e-5, atol=1e-6)


@of_launch("shared")
@pytest.mark.parametrize("kind", SHARED)
def test_wherever_samples_are_computed_they_train_as_drawn(kind: str, finished: Finished) -> None:
    """A window of two batches is shared out as a whole."""
    shared, drawn = finished(f"{kind}_shared"), finished(f"{kind}_drawn")
    assert_shared_out(shared)
    assert not any("moved" in step and step["moved"] for step in events(drawn, "step"))
    assert_same_training(shared, drawn)


def assert_as_on_one_device(kind: str, finished: Finished, baseline: TuneRun, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = finished(f"{kind}_shared")
    monkeypatch.setattr(LoRALinear, "initialize_parameters", same_everywhere)
    one = baseline(kind, *of_shared_steps(kind, 1), "epochs=1", "micro_batch_size=2", "lr_scheduler.num_warmup_steps=2")
    assert_shared_out(shared)
    assert_same_training(shared, one)
    assert kind != "full" or any("val_loss" in step for step in shared.metrics)


@of_launch("shared")
@pytest.mark.parametrize("kind", SHARED)
def test_two_ranks_share_out_steps_and_train_as_one_device(
    kind: str, finished: Finished, baseline: TuneRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_as_on_one_device(kind, finished, baseline, monkeypatch)


@pytest.mark.slow  # tests/loop/test_two_ranks.py has four ranks, too
@of_launch("shared_by_4")
@pytest.mark.parametrize("kind", SHARED)
def test_four_ranks_share_out_steps_and_train_as_one_device(
    kind: str, finished: Finished, baseline: TuneRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_as_on_one_device(kind, finished, baseline, monkeypatch)


@of_launch("shared")
@pytest.mark.parametrize("name", ["padded", "recovered"])
def test_steps_that_are_shared_out_padded_and_again_train_as_drawn(name: str, finished: Finished) -> None:
    """A step that ran out of memory in a forward, a backward, on one rank or on both, is shared out in more parts."""
    run = finished(name)
    assert_shared_out(run)
    assert_same_training(run, finished("full_drawn"))
    if name == "recovered":
        assert [step["oom_retries"] for step in run.by_step.values()] == [0, 1, 2, 3, 5, 5]
        failed = [step for step, fault in zip(events(run, "step"), SHARED_FAULTS, strict=True) if fault is not None]
        assert all(step["forwards"] > 1 for step in failed)
        # Whether samples move in the fourth step, which gains 2 %, depends on what forwards have taken.
        assert all(step["moved"] for step in failed if step["step"] != 4)


@of_launch("shared")
@pytest.mark.parametrize("kind", SHARED)
def test_a_run_that_is_shared_out_goes_on_within_an_epoch(kind: str, finished: Finished) -> None:
    """Memory runs out in both steps that are left."""
    whole, resumed = finished(f"{kind}_steps_whole"), finished(f"{kind}_steps")
    assert [event["step"] for event in events(resumed, "resume")] == [5]
    assert_shared_out(resumed)
    assert all(step["moved"] for step in events(resumed, "step")[-2:])
    assert [step["oom_retries"] for step in resumed.metrics[-2:]] == [1, 2]
    assert_same_training(resumed, whole, "step_7")


@of_launch("shared")
@pytest.mark.parametrize("function", ["pickled", "loads"])
def test_samples_that_cannot_be_sent_stay_where_they_were_drawn(
    function: str, finished: Finished, launched: tuple[Path, str]
) -> None:
    """From the step on in which that is seen, on either side."""
    run = finished(function)
    assert_shared_out(run, stops_after=1)
    assert_same_training(run, finished("full_drawn"))
    said = re.findall(r"warning: .*samples stay on the ranks.*", output_of(launched, function))
    assert len(said) == 1 and f"they cannot be sent (TypeError: this sample has a bug in {function})" in said[0]


@of_launch("shared")
def test_a_rank_that_ends_while_a_step_is_shared_out_ends_the_others(launched: tuple[Path, str]) -> None:
    other, own = ((launched[0] / "lost" / f"error_{rank}.txt").read_text() for rank in range(2))
    assert other.startswith("error: lost the connection to another rank: it has ended")
    assert "ZeroDivisionError" in own


def launch(inputs: Path, output_dir: Path, *launcher: str, overrides: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Start ``adaptive-batching run`` as users do."""
    settings = small_run(inputs, output_dir, "dataset.split=train[:32]", "epochs=1", *overrides)
    return subprocess.Popen(
        [sys.executable, "-m", "adaptive_batching", "run", *launcher, "full_finetune_distributed",
         "--config", "quickstart/full_single_device", *settings],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def test_a_rank_that_dies_of_something_else_ends_the_job_with_its_own_error(inputs: Path, tmp_path: Path) -> None:
    failing = ("loss._component_=tests.integration.two_ranks.LossThatFailsOnOneRank",)
    job = launch(inputs, tmp_path / "out", "--nproc_per_node", "2", overrides=failing)
    output, _ = job.communicate(timeout=120)
    assert job.returncode != 0
    assert "ZeroDivisionError: this rank has a bug" in output


@pytest.mark.slow  # the launch of `as_stock` is on two nodes
def test_two_agents_train_together(inputs: Path, tmp_path: Path) -> None:
    """As two nodes do, over the loopback device."""
    nodes = ["--nnodes", "2", "--nproc_per_node", "1", "--rdzv_id", "test", "--rdzv_backend", "c10d"]
    nodes += ["--rdzv_endpoint", f"127.0.0.1:{free_port()}"]
    agents = [launch(inputs, tmp_path / "out", *nodes) for _ in range(2)]
    outputs = [agent.communicate(timeout=300)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert len(without_sizes(Run(tmp_path / "out").metrics)) == 4
