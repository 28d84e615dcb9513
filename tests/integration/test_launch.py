"""An installed wheel, and what the command line answers. ``test_pages.py`` has the ways to launch that pages name."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support.command_line import in_this_process, small

TUNE = [sys.executable, "-c", "from torchtune._cli.tune import main; main()"]
OURS = [sys.executable, "-m", "adaptive_batching"]


def run(command: list[str], arguments: list[str], cwd: Path, site: Path) -> str:
    done = subprocess.run(
        [*command, "run", *arguments], cwd=cwd, env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def test_an_installed_wheel_in_any_directory(inputs: Path, tmp_path: Path) -> None:
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
    overrides = ["epochs=1", "use_maximum_batch_size=True", *shlex.split(small("lora", inputs, tmp_path / "out"))]
    output = run(TUNE, [recipe, "--config", str(config), *overrides], anywhere, site)
    assert "what was decided, and why" in output

    # The command line, by names, with a function in the working directory
    (anywhere / "mine.py").write_text("def add_eight(epoch, current_batch_size):\n    return 8\n")
    by_name = ["full_finetune_single_device", "--config", "quickstart/full_single_device"]
    by_name += [*shlex.split(small("full", inputs, tmp_path / "full")), "epochs=1", "use_maximum_batch_size=False"]
    by_name += ["batch_increase_function=mine.add_eight", "max_steps_per_epoch=1"]
    output = run(OURS, [*by_name, "adaptive_batching.max_batch_size=16"], anywhere, site)
    assert "batch size grows from 8 to 16 at epoch 0" in output and "dropped arguments: every" in output


def test_the_command_line_lists_recipes_and_configs_and_names_what_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert in_this_process("ls") == 0
    listed = capsys.readouterr().out
    rows = [line.split() for line in listed.splitlines()]
    assert {row[0] for row in rows if len(row) == 2} >= {path.stem for path in (ROOT / "recipes").glob("[a-z]*.py")}
    assert ["lora_finetune_single_device", "quickstart/lora_single_device"] in rows and ["llama3_2/1B_lora"] in rows
    assert "quickstart/full_single_device" in listed
    for arguments, message in (
        (["run", "lora_single_device", "--config", "x"], "there is no recipe 'lora_single_device'; did you mean"),
        (["run", "lora_finetune_single_device"], "--config <name or path> is missing after the recipe"),
        (["run", "lora_finetune_single_device", "--config", "1B_lora"], "there is no config '1B_lora'"),
    ):
        assert in_this_process(*arguments) == 2
        line = capsys.readouterr().err.strip().splitlines()[-1]
        assert message in line, line
