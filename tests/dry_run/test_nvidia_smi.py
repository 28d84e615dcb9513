"""The `nvidia-smi` of the emulated cards."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from adaptive_batching._dry_run.device import nvidia_smi, write_nvidia_smi

MIB = 2**20


@pytest.fixture(autouse=True)
def two_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cards of 1,000 MiB, of which this process has 150 of the second, and one that has ended has had all."""
    settings = {"COUNT": 2, "MEMORY": 1000 * MIB, "CAPABILITY": 86, "CONTEXT": 50 * MIB, "NAME": "NVIDIA A10"}
    for name, value in settings.items():
        monkeypatch.setenv(f"EMULATED_DEVICE_{name}", str(value))
    monkeypatch.setenv("ADAPTIVE_BATCHING_DRY_RUN", str(tmp_path))
    for process, size in ((os.getpid(), 100), (2**30, 1000)):
        (tmp_path / f"{process}.json").write_text(json.dumps({"process": process, "reserved_now": {"1": size * MIB}}))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--query-gpu=name,memory.total --format=csv", "name, memory.total [MiB]\n" + 2 * "NVIDIA A10, 1000 MiB\n"),
        ("--query-gpu=memory.used,memory.free --format=csv,noheader,nounits", "0, 1000\n150, 850\n"),
        ("-i 1 --query-gpu=index,temperature.gpu,compute_cap --format=csv,noheader", "1, [N/A], 8.6\n"),
        ("--id=0 --query-gpu=utilization.gpu --format=csv", "utilization.gpu [%]\n0 %\n"),
        ("--query-compute-apps=pid,used_memory --format=csv,noheader", "PID, 150 MiB\n"),
    ],
)
def test_a_query_is_answered_as_nvidia_s_program_does(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert nvidia_smi.main(arguments.split()) == 0
    assert capsys.readouterr().out == said.replace("PID", str(os.getpid()))


def test_cards_are_listed_and_a_card_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    nvidia_smi.main(["-L"])
    assert capsys.readouterr().out.startswith("GPU 0: NVIDIA A10 (UUID: GPU-")
    nvidia_smi.main([])
    assert "150MiB / 1000MiB" in capsys.readouterr().out
    assert nvidia_smi.main(["-i", "7"]) == 6


def test_it_is_a_program_that_needs_no_path_of_python(tmp_path: Path) -> None:
    write_nvidia_smi(tmp_path / "bin")
    said = subprocess.run([tmp_path / "bin" / "nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    assert said.count("NVIDIA A10") == 2
