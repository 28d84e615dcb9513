"""Two processes with DDP train as Trainer does, and one that runs out of memory takes the other along."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (the extra transformers)")

from adaptive_batching._report.events import find_record, read_events
from tests.conftest import ROOT
from tests.transformers import trainers


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("two_ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.transformers.two_ranks", str(folder)],
            cwd=ROOT, env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=300)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(text[-3000:] for text in said)
    found = [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(2)]
    return [{**each, "folder": folder} for each in found]


@pytest.mark.parametrize("name", ["parts", "short", "probed"])
def test_two_processes_train_as_trainer_does(name: str, ranks: list[dict[str, Any]]) -> None:
    losses, stock = ([each for each in ranks[0][run]["logged"] if "loss" in each] for run in (name, "stock"))
    assert len(losses) == len(stock) == 4
    for ours, theirs in zip(losses, stock, strict=True):
        for key in ("loss", "grad_norm", "learning_rate", "epoch"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5), key
    assert ranks[0][name]["weights"] == ranks[1][name]["weights"], "both have the same weights"


def test_the_first_process_records_what_all_have_done(ranks: list[dict[str, Any]]) -> None:
    record = read_events(find_record(ranks[0]["folder"] / "short"))
    assert [each["ranks"] for each in record["run"]] == [2] and len(record["end"]) == 1
    logs = [each for each in ranks[0]["short"]["logged"] if "loss" in each]
    assert [each["step"] for each in record["step"]] == [1, 2, 3, 4]
    assert [each["recoveries"] for each in record["step"]] == [each["oom_retries"] for each in logs]
    # Of 45 samples each process gets 3 batches of 8, two of which make a step: Accelerate repeats 3 samples.
    assert [each["samples"] for each in record["step"]] == [32, 16] * 2
    assert "on rank 1 with 8 samples" in record["recovery"][0]["failed"]
    assert [sum(each["samples"] for each in plan["epochs"]) for plan in record["plan"]] == [96]


@pytest.mark.parametrize("name", ["parts sft", "short sft", "probed sft"])
def test_two_processes_of_trl_train_as_before(name: str, ranks: list[dict[str, Any]]) -> None:
    pytest.importorskip("trl", reason="trl is not installed")
    losses, stock = ([each for each in ranks[0][run]["logged"] if "loss" in each] for run in (name, "stock sft"))
    assert len(losses) == len(stock) == 6
    for ours, theirs in zip(losses, stock, strict=True):
        assert ours.keys() == {*theirs, *trainers.OURS}
        for key in ("loss", "grad_norm", "learning_rate", "epoch", "num_tokens"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5), key
        assert ours["entropy"] == pytest.approx(theirs["entropy"], rel=1e-2)
    assert ranks[0][name]["weights"] == ranks[1][name]["weights"], "both have the same weights"
    assert (ranks[1][name]["recoveries"] > 0) == name.startswith("short")


@pytest.mark.parametrize("name", ["short", "short bert"])
def test_all_recover_when_one_runs_out_of_memory(name: str, ranks: list[dict[str, Any]]) -> None:
    assert ranks[0][name]["recoveries"] == ranks[1][name]["recoveries"] >= 1
    whole = ranks[0][name.replace("short", "parts")]["logged"]
    for ours, parts in zip(ranks[0][name]["logged"], whole, strict=True):
        if "loss" in ours:
            assert ours["loss"] == pytest.approx(parts["loss"], rel=1e-5)
            assert ours["grad_norm"] == pytest.approx(parts["grad_norm"], rel=1e-4)
