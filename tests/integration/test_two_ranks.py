"""The distributed recipes on two processes of one machine; see ``two_ranks.py`` for the runs."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torchtune.modules.peft import LoRALinear

from adaptive_batching._torchtune.loop import TrainingLoop
from tests.conftest import ARCHITECTURE, ROOT, Run, TuneRun, assert_close, assert_same_weights
from tests.integration.one_target import NOISE, truth
from tests.integration.two_ranks import same_everywhere
from tests.support.html import read_page
from tests.support.launches import (
    Finished,
    assert_validated_as_one_by_one,
    assert_went_on,
    of_launch,
    output_of,
)
from tests.support.overrides import SGD, VALIDATE
from tests.support.records import events, without_sizes

KINDS = pytest.mark.parametrize("kind", ["full", "lora"])


@of_launch("as_stock")
@KINDS
def test_off_is_stock(kind: str, finished: Finished) -> None:
    ours, stock = finished(f"{kind}_off"), finished(f"{kind}_stock")
    assert len(stock.metrics) == 3
    assert ours.metrics == stock.metrics
    assert_same_weights(ours.weights(0), stock.weights(0))


@of_launch("as_stock")
def test_ranks_validate_each_sample_once_and_train_as_without(
    finished: Finished, launched: tuple[Path, str], tune_run: TuneRun
) -> None:
    """Eleven samples, of which one rank has more; the first step has a rate of 0, so its loss is that of one device."""
    one_device = tune_run("full", "epochs=1", "max_steps_per_epoch=1", *VALIDATE, "run_val_every_n_steps=1")
    losses = assert_validated_as_one_by_one("full_off", "validated", "validated_again", finished, launched)
    assert losses[0] == pytest.approx(one_device.metrics[1]["val_loss"], rel=1e-6)


@of_launch("cut")
@KINDS
def test_two_ranks_train_as_one_device_on_the_same_samples(
    kind: str, finished: Finished, tune_run: TuneRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoRALinear, "initialize_parameters", same_everywhere)
    one = tune_run(kind, *SGD, "batch_size=8", "gradient_accumulation_steps=2", "epochs=1", "dataset.split=train[:48]",
                   "lr_scheduler.num_warmup_steps=2")  # fmt: skip
    assert_close(finished(f"{kind}_whole"), one, epoch=0)


@of_launch("cut")
@KINDS
@pytest.mark.parametrize("size", ["1", "2", "auto"])
def test_however_the_ranks_cut_they_train_as_the_whole_batch(kind: str, size: str, finished: Finished) -> None:
    cut, whole = finished(f"{kind}_cut_{size}"), finished(f"{kind}_whole")
    pairs = [(weights, cut.weights(0)[name]) for name, weights in whole.weights(0).items()]
    assert not all(torch.equal(*pair) for pair in pairs), "rounding tells that batches were cut"
    assert_close(cut, whole, epoch=0)
    if size == "auto":
        assert events(cut, "probe")[0]["batch_size"] == 8, "what a rank has in a step"


@of_launch("cut")
@KINDS
@pytest.mark.parametrize("failure", [f"{where}_{on}" for where in ("forward", "backward") for on in ("0", "1", "01")]
                         + ["first", "twice"])  # fmt: skip
def test_a_rank_that_runs_out_of_memory_loses_and_repeats_nothing(
    kind: str, failure: str, finished: Finished, launched: tuple[Path, str]
) -> None:
    recovered = finished(f"{kind}_{failure}")
    assert recovered.metrics[-1]["out_of_memory_recoveries"] == (2 if failure == "twice" else 1)
    assert_close(recovered, finished(f"{kind}_whole"), epoch=0)
    said = re.findall(r"out of memory (.*); running the step's samples again", output_of(launched, f"{kind}_{failure}"))
    assert len(said) == (2 if failure == "twice" else 1), "one rank says so, for all"
    on = {"first": "1", "twice": "0"}.get(failure, failure.rpartition("_")[2])
    assert re.findall(r"on rank (\d) with \d samples? of up to \d+ tokens", said[0]) == list(on)


@of_launch("recovery")
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_recovery_with_activation_checkpointing(where: str, finished: Finished) -> None:
    recovered = finished(f"checkpointing_{where}")
    assert recovered.metrics[-1]["out_of_memory_recoveries"] == 1
    assert_close(recovered, finished("checkpointing_whole"), epoch=0)


@of_launch("recovery")
def test_a_sample_that_fits_on_one_rank_alone_ends_the_run_on_all(launched: tuple[Path, str]) -> None:
    errors = [(launched[0] / "hopeless" / f"error_{rank}.txt").read_text() for rank in range(2)]
    assert re.search(r"out of memory with 1 sample of up to \d+ tokens, which cannot be cut: number \d+", errors[1])
    assert "out of memory on another rank" in errors[0]
    words = read_page(launched[0] / "hopeless" / "adaptive_batching" / "report.html").words["error"]
    assert "DoesNotFitError on rank 0" in words and "out of memory on another rank" in words
    assert "DoesNotFitError on rank 1" in words and errors[1].splitlines()[0].removeprefix("error: ") in words


@pytest.mark.parametrize(
    ("launched", "kind", "names"),
    [
        pytest.param(
            "noise", "full", {"noise": 0.05, "noise_auto": 0.1}, marks=pytest.mark.xdist_group("two_ranks_noise")
        ),
        pytest.param("noise", "lora", {"noise": 0.05}, marks=pytest.mark.xdist_group("two_ranks_noise")),
        pytest.param("noise_by_length", "lora", {"noise_auto": 0.1}, marks=pytest.mark.slow),
    ],
    indirect=["launched"],
)
def test_the_noise_scale_is_right_on_two_ranks(
    kind: str, names: dict[str, float], finished: Finished, tune_run: TuneRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    truths = []

    def ask(self: TrainingLoop) -> None:
        truths.append(truth(self._host))

    monkeypatch.setattr(LoRALinear, "initialize_parameters", same_everywhere)
    monkeypatch.setattr(TrainingLoop, "run", ask)
    tune_run(kind, *NOISE, "batch_size=5", "dataset._component_=tests.integration.one_target.OneTarget")
    for name, tolerance in names.items():
        measured = events(finished(f"{kind}_{name}"), "noise")
        mean = [sum(event[key] for event in measured) / 30 for key in ("variance", "norm_squared")]
        assert mean == pytest.approx(list(truths[0]), rel=tolerance), name


@of_launch("noise")
def test_ranks_grow_together_by_what_they_measure_together(finished: Finished) -> None:
    run = finished("by_noise")
    sizes = [step["batch_size_samples"] for step in run.metrics]
    assert sizes == sorted(sizes) and 4 == sizes[0] < sizes[-1] <= 12
    assert "gradient_noise_scale_samples" in run.metrics[-1]


@of_launch("recovery")
def test_where_recovery_is_off_the_run_ends_and_says_what_to_set(launched: tuple[Path, str]) -> None:
    error = (launched[0] / "not_to_recover" / "error_0.txt").read_text()
    assert error.startswith("error: out of memory in a forward or backward of 4 samples of up to")
    assert "set adaptive_batching.recover_from_oom=True" in error.splitlines()[0]


@of_launch("recovery")
def test_parameters_on_the_host_train_and_recover_as_those_on_the_device(finished: Finished) -> None:
    assert_close(finished("offload"), finished("full_whole"), epoch=0)
    assert finished("offload_backward").metrics[-1]["out_of_memory_recoveries"] == 1
    assert_close(finished("offload_backward"), finished("full_whole"), epoch=0)


@of_launch("growth")
def test_a_function_that_answers_each_rank_otherwise_cannot_split_them(finished: Finished) -> None:
    assert [epoch["batch_size"] for epoch in events(finished("agreed"), "epoch")] == [4, 6, 8]


@of_launch("growth")
def test_a_resumed_run_equals_the_uninterrupted_one(finished: Finished, launched: tuple[Path, str]) -> None:
    whole, resumed = finished("uninterrupted"), Run(launched[0] / "resumed")
    assert "the power went out" in (launched[0] / "resumed" / "error_0.txt").read_text()
    assert [epoch["batch_size"] for epoch in events(whole, "epoch")] == [4, 8, 16]
    assert resumed.metrics == whole.metrics
    assert_same_weights(resumed.weights(2), whole.weights(2))


@of_launch("growth")
def test_a_run_resumed_from_an_asynchronous_checkpoint_equals_the_uninterrupted_one(
    launched: tuple[Path, str],
) -> None:
    whole, resumed = Run(launched[0] / "async"), Run(launched[0] / "async_resumed")
    assert "the power went out" in (launched[0] / "async_resumed" / "error_0.txt").read_text()
    assert [epoch["batch_size"] for epoch in events(whole, "epoch")] == [4, 8, 16]
    assert resumed.metrics == whole.metrics
    assert_same_weights(resumed.weights(2), whole.weights(2))


@of_launch("growth")
@pytest.mark.parametrize("name", ["full_steps", "async_steps"])
def test_a_run_that_is_cut_off_within_an_epoch_goes_on_as_if_it_had_not_been(
    name: str, launched: tuple[Path, str]
) -> None:
    assert_went_on(launched[0], name, "step_7")


@of_launch("growth")
def test_of_asynchronous_checkpoints_of_steps_the_last_one_alone_keeps_its_state(launched: tuple[Path, str]) -> None:
    folders = sorted((launched[0] / "async_steps_whole").glob("dist_step_*"))
    assert [folder.name for folder in folders] == [f"dist_step_{step}" for step in range(1, 7)]
    assert [folder.name for folder in folders if (folder / "recipe.pt").exists()] == ["dist_step_6"]
    keys = [
        {name.split(".")[0] for name in FileSystemReader(folder).read_metadata().state_dict_metadata}
        for folder in folders
    ]
    assert keys[:-1] == [{"model"}] * 5 and "optimizer" in keys[-1]


@of_launch("cut")
def test_a_checkpoint_of_two_ranks_loads_on_one_device(launched: tuple[Path, str], tune_run: TuneRun) -> None:
    saved = launched[0] / "full_whole" / "epoch_0"
    run = tune_run("full", "epochs=1", f"checkpointer.checkpoint_dir={saved}",
                   "checkpointer.checkpoint_files=[model-00001-of-00001.safetensors]")  # fmt: skip
    assert run.metrics[0]["loss"] < Run(launched[0] / "full_whole").metrics[0]["loss"]


@of_launch("as_stock")
def test_optimizers_in_the_backward_pass_train_as_stock_and_are_not_probed(
    finished: Finished, launched: tuple[Path, str]
) -> None:
    ours, stock = finished("in_backward_off"), finished("in_backward_stock")
    assert ours.metrics == stock.metrics
    assert_same_weights(ours.weights(0), stock.weights(0))
    assert "recovery from running out of memory is off: optimizer_in_bwd=True" in output_of(launched, "in_backward_off")
    for rank in range(2):
        error = (launched[0] / "in_backward_probe" / f"error_{rank}.txt").read_text()
        assert "the largest batch cannot be probed on several devices: optimizer_in_bwd=True" in error


@of_launch("as_stock")
def test_tensor_parallelism_trains_as_stock_and_says_that_recovery_is_off(
    finished: Finished, launched: tuple[Path, str]
) -> None:
    ours, stock = finished("tensor_parallel_off"), finished("tensor_parallel_stock")
    assert ours.metrics == stock.metrics
    assert_same_weights(ours.weights(0), stock.weights(0))
    assert "is off: tensor_parallel_dim above 1" in output_of(launched, "tensor_parallel_off")


@of_launch("growth")
def test_the_global_batch_is_kept_on_two_ranks(finished: Finished) -> None:
    kept, constant = finished("kept"), finished("constant")
    assert {step["global_batch_size_samples"] for step in kept.metrics} == {16}
    assert sorted({step["batch_size_samples"] for step in kept.metrics}) == [2, 4, 8]
    assert_close(kept, constant, epoch=2)


def test_a_rank_that_dies_of_something_else_ends_the_job_with_its_own_error(inputs: Path, tmp_path: Path) -> None:
    code = "from torchtune._cli.tune import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "run", "--nproc_per_node", "2", "recipes/full_finetune_distributed.py",
         "--config", "recipes/configs/quickstart/full_single_device.yaml", f"data_dir={inputs}",
         f"output_dir={tmp_path / 'out'}", "dataset.split=train[:48]", "batch_size=4", "epochs=1",
         "tokenizer.max_seq_len=64", "use_maximum_batch_size=False", "batch_increase_function=null",
         "loss._component_=tests.integration.two_ranks.LossThatFailsOnOneRank",
         *(f"model.{key}={value}" for key, value in ARCHITECTURE.items())],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, timeout=120, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "ZeroDivisionError: this rank has a bug" in done.stdout


def test_two_agents_train_together(inputs: Path, tmp_path: Path) -> None:
    """As two nodes do, over the loopback device."""
    overrides = [
        f"data_dir={inputs}", f"output_dir={tmp_path / 'out'}", "dataset.split=train[:48]", "batch_size=4", "epochs=1",
        "tokenizer.max_seq_len=64", "lr_scheduler.num_warmup_steps=2", "use_maximum_batch_size=False",
        "batch_increase_function=null", *(f"model.{key}={value}" for key, value in ARCHITECTURE.items()),
    ]  # fmt: skip
    code = "from torchtune._cli.tune import main; main()"
    agents = []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    for _ in range(2):
        launch = ["run", "--nnodes", "2", "--nproc_per_node", "1", "--rdzv_id", "test", "--rdzv_backend", "c10d",
                  "--rdzv_endpoint", endpoint]  # fmt: skip
        config = "recipes/configs/quickstart/full_single_device.yaml"
        recipe = ["recipes/full_finetune_distributed.py", "--config", config]
        agents.append(
            subprocess.Popen(
                [sys.executable, "-c", code, *launch, *recipe, *overrides], cwd=ROOT, text=True,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
        )  # fmt: skip
    outputs = [agent.communicate(timeout=300)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert len(without_sizes(Run(tmp_path / "out").metrics)) == 6
