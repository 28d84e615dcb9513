"""Checkpoints of PPO after every few rollouts: policy and value model are always those of the same one."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file
from torchtune.training.checkpointing import _checkpointer

from adaptive_batching._torchtune.ppo.value_model import take_value_model_of
from adaptive_batching._torchtune.stock.checkpoints import from_last_checkpoint
from adaptive_batching._values import ConfigError
from tests.conftest import assert_same_weights
from tests.integration.test_checkpoints import full_disk_from
from tests.support.power_cut import FUNCTION
from tests.support.ppo import PPORun, config_of, ppo_run
from tests.support.records import events

RESUME = "resume_from_checkpoint=True"
ADAM = ["optimizer._component_=torch.optim.AdamW", "optimizer.lr=1e-3"]
# 24 prompts: 6 rollouts of 2 and 3 of 4 in the first epoch, 3 of 8 in the second.
GROW = [
    *FUNCTION, "adaptive_batching.increase_every=0.5", "adaptive_batching.max_batch_size=8", *ADAM,
    "batch_size=2", "num_steps=48", "save_every_n_steps=4",
]  # fmt: skip
ALONE = [*ADAM, "optimizer_in_bwd=True", "save_every_n_steps=2"]


def folders(run: PPORun) -> list[str]:
    """The folders of checkpoints that both models have, those that hold the state of the optimizer marked."""
    both = [{path.name: path for path in where.glob("step_*")} for where in (run.output_dir, run.output_dir / "value")]
    assert both[0].keys() == both[1].keys()
    return [name + ("*" if (both[0][name] / "recipe_state.pt").exists() else "") for name in sorted(both[0])]


def test_a_run_that_is_cut_off_within_epochs_goes_on_as_if_it_had_not_been(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, batches, samples drawn, random orders, both optimizers, and growth within the epoch."""
    whole = ppo_run(inputs, tmp_path / "whole", *GROW)
    broken, resume = PPORun(tmp_path / "broken"), list[str]()
    for moment, left in ((0.5, ["step_4*"]), (1.5, ["step_4", "step_8*"])):
        monkeypatch.setattr("tests.support.power_cut.fail_at_epoch", moment)
        with pytest.raises(SystemExit, match="the power went out"):
            ppo_run(inputs, broken.output_dir, *GROW, *resume)
        assert folders(broken) == left
        resume = [RESUME]
    monkeypatch.setattr("tests.support.power_cut.fail_at_epoch", None)
    resumed = ppo_run(inputs, broken.output_dir, *GROW, RESUME)
    assert folders(resumed) == folders(whole) == ["step_12", "step_4", "step_8*"]
    assert [step["batch_size"] for step in whole.metrics] == [2] * 6 + [4] * 3 + [8] * 3
    assert resumed.by_step == whole.by_step
    for folder in ("step_8", "step_12"):
        assert_same_weights(resumed.weights_in(folder), whole.weights_in(folder))
    assert [event["step"] for event in events(resumed, "resume")] == [4, 8]


@contextlib.contextmanager
def copied_at_each_moment(output_dir: Path, copies: list[Path]) -> Iterator[None]:
    """Copy ``output_dir`` before each operation on its files, and within those that write: what a kill leaves."""

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            for writes in [False, True] if function in (torch.save, save_file) else [False]:
                if writes:
                    Path(arguments[1]).write_bytes(bytes(1000))
                copies.append(output_dir.parent / f"moment_{len(copies)}")
                shutil.copytree(output_dir, copies[-1])
            return function(*arguments, **options)

        return call

    with (
        mock.patch.multiple(os, rename=noted(os.rename), unlink=noted(os.unlink), rmdir=noted(os.rmdir)),
        mock.patch.object(torch, "save", noted(torch.save)),
        mock.patch.object(_checkpointer, "save_file", noted(save_file)),
    ):
        yield


def pair_at(inputs: Path, output_dir: Path) -> tuple[str, bytes, bytes] | None:
    """The checkpoint that a run in ``output_dir`` goes on from: its name and the weights of both models."""
    cfg = OmegaConf.create(config_of(inputs, output_dir))
    try:
        with from_last_checkpoint(cfg):
            take_value_model_of(cfg.checkpointer, cfg.value_checkpointer)
        [policy], [value] = cfg.checkpointer.checkpoint_files, cfg.value_checkpointer.checkpoint_files
        value_path = Path(cfg.value_checkpointer.checkpoint_dir, value)
        return value_path.parent.name, (output_dir / policy).read_bytes(), value_path.read_bytes()
    except (ConfigError, FileNotFoundError):  # nothing to go on from
        return None


def pair_in(run: PPORun, name: str) -> tuple[str, bytes, bytes]:
    file = "model-00001-of-00001.safetensors"
    both = (run.output_dir / name / file, run.output_dir / "value" / name / file)
    return name, both[0].read_bytes(), both[1].read_bytes()


@pytest.mark.wide
def test_a_kill_at_any_moment_leaves_both_models_of_one_checkpoint(inputs: Path, tmp_path: Path) -> None:
    """Also where a run that is not resumed saves over the checkpoints of another."""
    run = ppo_run(inputs, tmp_path / "out", *ALONE, "num_steps=12", "seed=4")
    earlier, copies = pair_in(run, "step_2"), list[Path]()
    assert folders(run) == ["step_2*", "step_3"]
    with copied_at_each_moment(run.output_dir, copies):
        ppo_run(inputs, run.output_dir, *ALONE)
    assert folders(run) == ["step_2", "step_3", "step_4*", "step_6"]
    pairs = [earlier, pair_in(run, "step_2"), pair_in(run, "step_4")]
    met = list[int]()
    for copy in copies:
        pair = pair_at(inputs, copy)
        if pair is None:
            assert (copy / "unfinished_checkpoint" / "replaced").exists(), "two folders cannot be swapped at once"
            continue
        assert pair in pairs, copy
        met.append(pairs.index(pair))
    assert met == sorted(met) and set(met) == {0, 1, 2}

    [between] = [copy for copy in copies if (copy / "value/step_4").exists() and not (copy / "step_4").exists()][-1:]
    shutil.rmtree(between / "logs")
    resumed = ppo_run(inputs, between, *ALONE, RESUME)
    last_steps = dict(list(run.by_step.items())[-4:])
    assert resumed.by_step == last_steps and len(events(resumed, "resume")) == 1
    assert_same_weights(resumed.weights_in("step_6"), run.weights_in("step_6"))


@pytest.mark.wide
def test_a_kill_at_the_end_of_an_epoch_leaves_both_models_of_one(inputs: Path, tmp_path: Path) -> None:
    copies = list[Path]()
    with copied_at_each_moment(tmp_path / "out", copies):
        run = ppo_run(inputs, tmp_path / "out", *ADAM, *FUNCTION, "adaptive_batching.max_batch_size=4", "num_steps=72")
    pairs = [pair_in(run, f"epoch_{epoch}") for epoch in (0, 1)]  # the last has no state
    met = list[int]()
    for copy in copies:
        pair = pair_at(inputs, copy)
        assert pair in (pairs if met else [None, *pairs]), copy
        met += [] if pair is None else [pairs.index(pair)]
    assert met == sorted(met) and set(met) == {0, 1}


def test_a_full_disk_leaves_the_checkpoint_before_and_a_value_model_that_is_gone_is_missed(
    inputs: Path, tmp_path: Path
) -> None:
    full = full_disk_from(4, save_file)  # the value model of the second
    with mock.patch.object(_checkpointer, "save_file", full), pytest.raises(SystemExit) as error:
        ppo_run(inputs, tmp_path / "out", *ALONE)
    assert "the checkpoint of step 4 cannot be written" in str(error.value)
    assert "The checkpoint step_2 is intact" in str(error.value)
    assert folders(PPORun(tmp_path / "out")) == ["step_2*"]
    assert not list((tmp_path / "out").glob("**/unfinished_checkpoint"))
    shutil.rmtree(tmp_path / "out" / "value" / "step_2")
    with pytest.raises(SystemExit, match=r"value_checkpointer.output_dir=.*no value model of step_2, from which"):
        ppo_run(inputs, tmp_path / "out", *ALONE, RESUME)
