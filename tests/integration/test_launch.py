"""The ways to launch that docs/command-line.md names."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conftest import ARCHITECTURE, ROOT

TUNE = [sys.executable, "-c", "from torchtune._cli.tune import main; main()"]


OURS = [sys.executable, "-m", "adaptive_batching"]


def run(arguments: list[str], cwd: Path, pythonpath: str = "", command: Sequence[str] = (*TUNE, "run")) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"PYTHONPATH": pythonpath}
    done = subprocess.run(
        [*command, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


@pytest.fixture
def overrides(inputs: Path, tmp_path: Path) -> list[str]:
    return [
        f"output_dir={tmp_path / 'out'}", "dataset.split=train[:40]", "tokenizer.max_seq_len=64", "epochs=1",
        "use_maximum_batch_size=True", f"tokenizer.path={inputs}/tokenizer.model",
        f"dataset.data_files={inputs}/train.json", f"checkpointer.checkpoint_dir={inputs}/model",
        *(f"model.{key}={value}" for key, value in ARCHITECTURE.items()),
    ]  # fmt: skip


def test_a_stock_config_by_name_in_a_checkout(overrides: list[str]) -> None:
    """Everything but the model, the data and the device is the stock config's."""
    small = [
        "device=cpu", "dtype=fp32", "model._component_=torchtune.models.llama2.lora_llama2",
        "tokenizer._component_=torchtune.models.llama2.llama2_tokenizer", "checkpointer.model_type=LLAMA2",
        "dataset._component_=torchtune.datasets.instruct_dataset", "dataset.source=json",
        "dataset.column_map.input=instruction", "dataset.column_map.output=output",
        "adaptive_batching.memory_limit=6GiB", "enable_activation_checkpointing=False",
    ]  # fmt: skip
    output = run(
        ["recipes/lora_finetune_single_device.py", "--config", "llama3_2/1B_lora_single_device", *overrides, *small],
        cwd=ROOT, pythonpath=".",
    )  # fmt: skip
    assert "what was decided, and why" in output
    assert "bound by" in output


def test_the_recipes_folder_of_a_checkout(overrides: list[str]) -> None:
    output = run(
        ["full_finetune_single_device.py", "--config", "configs/quickstart/full_single_device.yaml", *overrides],
        cwd=ROOT / "recipes", pythonpath=str(ROOT) if not _installed() else "",
    )  # fmt: skip
    assert "what was decided, and why" in output


def test_an_installed_wheel_in_any_directory(overrides: list[str], tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", tmp_path, ROOT], check=True, timeout=300)
    [wheel] = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"adaptive_batching"}
    assert "adaptive_batching/recipes/configs/quickstart/full_single_device.yaml" in names
    assert "adaptive_batching/py.typed" in names

    site, anywhere = tmp_path / "site", tmp_path / "anywhere"
    anywhere.mkdir()
    subprocess.run([*pip, "install", "--no-deps", "--target", site, wheel], check=True, timeout=300)
    config = site / "adaptive_batching/recipes/configs/quickstart/lora_single_device.yaml"
    recipe = "adaptive_batching/recipes/lora_finetune_single_device.py"
    output = run([recipe, "--config", str(config), *overrides], cwd=anywhere, pythonpath=str(site))
    assert "what was decided, and why" in output

    # The command line, by names, with a function in the working directory
    (anywhere / "mine.py").write_text("def add_eight(epoch, current_batch_size):\n    return 8\n")
    by_name = ["run", "full_finetune_single_device", "--config", "quickstart/full_single_device", *overrides]
    by_name += ["use_maximum_batch_size=False", "batch_increase_function=mine.add_eight", "max_steps_per_epoch=1"]
    output = run([*by_name, "adaptive_batching.max_batch_size=16"], anywhere, str(site), OURS)
    assert "batch size grows from 8 to 16 at epoch 0" in output and "dropped arguments: every" in output


def test_the_command_line_lists_recipes_and_configs_and_names_what_is_missing(tmp_path: Path) -> None:
    def end_of(*arguments: str) -> tuple[int, str]:
        done = subprocess.run([*OURS, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
        return done.returncode, (done.stdout + done.stderr).strip().splitlines()[-1]

    listed = subprocess.run([*OURS, "ls"], cwd=ROOT, capture_output=True, text=True, timeout=100, check=True).stdout
    rows = [line.split() for line in listed.splitlines()]
    assert {row[0] for row in rows if len(row) == 2} >= {path.stem for path in (ROOT / "recipes").glob("[a-z]*.py")}
    assert ["lora_finetune_single_device", "quickstart/lora_single_device"] in rows and ["llama3_2/1B_lora"] in rows
    assert "quickstart/full_single_device" in listed
    assert end_of("cp", "quickstart/full_single_device", str(tmp_path / "mine.yaml"))[0] == 0
    assert "use_maximum_batch_size" in (tmp_path / "mine.yaml").read_text()
    for arguments, message in (
        (["run", "lora_single_device", "--config", "x"], "there is no recipe 'lora_single_device'; did you mean"),
        (["run", "lora_finetune_single_device"], "--config <name or path> is missing after the recipe"),
        (["run", "lora_finetune_single_device", "--config", "1B_lora"], "there is no config '1B_lora'"),
    ):
        code, line = end_of(*arguments)
        assert code == 2 and message in line, line


def _installed() -> bool:
    code = "import adaptive_batching"
    return subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, check=False).returncode == 0
