"""The examples run as they stand, and end with what they say."""

from __future__ import annotations

import importlib
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

from tests.conftest import ROOT

SAYS = {
    "plain_loop": ["64 of the longest samples fit", "epoch 0: loss", "5 steps ran again in smaller parts"],
    "sft_lora": ["forward passes       of up to 32 x 200 tokens", "the plan: 8 steps"],
    "dpo": ["bound by the samples of an optimizer step", "the plan: 6 steps"],
    "grpo": ["completions are packed without padding"],
}
TWO_RANKS = "two_ranks"
NOT_INSTALLED = "sentence_transformers_pairs"  # what it needs is not among what tests need


@pytest.mark.wide
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "grpo")) for name in SAYS])
def test_an_example_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # The torchao that torchtune takes is older than what PEFT asks for, and is not used here.
    monkeypatch.setattr(importlib.import_module("peft.tuners.lora.torchao"), "is_torchao_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [name])
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    said = "".join(capfd.readouterr())
    assert all(words in said for words in SAYS[name]), said


@pytest.mark.slow
def test_the_example_of_two_ranks_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0"]
    done = subprocess.run(
        [*command, str(ROOT / "examples" / f"{TWO_RANKS}.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the plan: 4 steps" in done.stdout


def check_notebook(notebook: Any) -> None:
    """All losses of its runs agree, and the last of them has run out of memory."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert outputs and not any(output.output_type == "error" for output in outputs)
    said = "".join(output.get("text", "") for output in outputs)
    losses = re.findall(r"^(?:Trainer|adaptive|losses) +(\d\.\d{4} \d\.\d{4})$", said, flags=re.MULTILINE)
    assert len(losses) == 3 and len(set(losses)) == 1, losses
    assert "retries 2 2" in said and "report.html" in said


def test_the_notebook_as_it_is_kept_has_run() -> None:
    notebook = nbformat.read(ROOT / "examples" / "quickstart.ipynb", 4)
    check_notebook(notebook)
    assert "does not fit: RTX 4090" in str(notebook.cells[-1].outputs)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "examples" / "quickstart.ipynb", 4)
    for cell in notebook.cells:
        cell.pop("outputs", None)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    check_notebook(notebook)


def test_each_example_is_run_or_is_a_frameworks() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == {*SAYS, TWO_RANKS, NOT_INSTALLED}
