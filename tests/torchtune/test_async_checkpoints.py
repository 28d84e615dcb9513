"""Distributed checkpoints of steps: one that another follows keeps its weights, and nothing else."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from adaptive_batching._torchtune.stock import async_checkpoints
from adaptive_batching._torchtune.stock.async_checkpoints import _supersede, check_that_state_is_there
from adaptive_batching._values import ConfigError


def save(folder: Path) -> dict[str, Any]:
    """Save a model and what training needs, as torchtune does; return the weights."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 7))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    values = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs_run": 1, "seed": 0}
    folder.mkdir()
    torch.save({}, folder / "recipe.pt")
    save_distributed(values, storage_writer=FileSystemWriter(folder, single_file_per_rank=False))
    return model.state_dict()


def loaded(folder: Path) -> dict[str, Any]:
    dcp_to_torch_save(folder, folder.parent / "loaded.pt")
    found: dict[str, Any] = torch.load(folder.parent / "loaded.pt")
    return found


def complete(folder: Path, error: Exception | None = None) -> None:
    """Tell that a checkpoint has been saved, or has failed."""
    done: Future[None] = Future()
    done.set_exception(error) if error else done.set_result(None)
    _supersede(folder, done)


def test_those_before_one_that_is_complete_keep_their_weights_alone(tmp_path: Path) -> None:
    first, *others = (tmp_path / f"dist_step_{step}" for step in (4, 8, 12))
    weights = save(first)
    for folder in others:
        save(folder)
    broken_off, another = tmp_path / "dist_step_6", tmp_path / "dist_step_4_of_mine"
    for folder in (broken_off, another):
        folder.mkdir()
    (broken_off / "__0_0.distcp").touch()
    for _ in range(2):  # as well where it was done before
        complete(others[0])
    earlier = loaded(first)
    assert earlier.keys() == {"model"}
    assert all(torch.equal(earlier["model"][name], weight) for name, weight in weights.items())
    assert len(list(first.glob("*.distcp"))) == len(weights)
    with pytest.raises(ConfigError, match=r"resume_from_checkpoint=True, .*, dist_step_4, has only weights; set"):
        check_that_state_is_there(first)
    for folder in others:
        check_that_state_is_there(folder)
        assert loaded(folder).keys() == {"model", "optimizer", "epochs_run", "seed"}
    assert (broken_off / "__0_0.distcp").exists() and another.exists()


def test_two_that_are_complete_at_once_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (4, 8, 12):
        (tmp_path / f"dist_step_{step}").mkdir()
    running: list[Path] = []
    overlaps: list[bool] = []

    def note(folder: Path) -> None:
        overlaps.append(bool(running))
        running.append(folder)
        time.sleep(0.1)
        running.pop()

    monkeypatch.setattr(async_checkpoints, "keep_weights_alone", note)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(complete, (tmp_path / "dist_step_8", tmp_path / "dist_step_12")))
    assert overlaps == [False] * 3


@pytest.mark.parametrize("error", [OSError("No space left on device"), None], ids=["not saved", "not there"])
def test_nothing_is_removed_where_the_next_one_is_not_there(
    error: Exception | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path / "dist_step_4")
    if error is not None:
        (tmp_path / "dist_step_8").mkdir()
    complete(tmp_path / "dist_step_8", error)
    assert "optimizer" in loaded(tmp_path / "dist_step_4")
    assert ("could not be removed" in caplog.text) == (error is None)
