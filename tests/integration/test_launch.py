"""An installed wheel, and what the command line answers. ``test_pages.py`` has the ways to launch that pages name."""

from __future__ import annotations

import os
import re
import shlex
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from adaptive_batching._torchtune.cli import commands
from adaptive_batching._torchtune.names import config_files
from adaptive_batching.torchtune import entry_point, recipe
from tests.conftest import ROOT, small_run
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


@pytest.mark.wide
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
    overrides = [*shlex.split(small("lora", inputs, tmp_path / "out")), "--only-probe"]
    output = run(TUNE, [recipe, "--config", str(config), *overrides], anywhere, site)
    assert "maximum batch size" in output and "resolved config" not in output
    assert not list((tmp_path / "out").glob("epoch_*")), "a probe trains nothing"

    # The command line, by names, with a function in the working directory
    (anywhere / "mine.py").write_text("def add_eight(epoch, current_batch_size):\n    return 8\n")
    by_name = ["full_finetune_single_device", "--config", "quickstart/full_single_device"]
    by_name += [*shlex.split(small("full", inputs, tmp_path / "full")), "epochs=1", "use_maximum_batch_size=False"]
    by_name += ["batch_increase_function=mine.add_eight", "max_steps_per_epoch=1"]
    output = run(OURS, [*by_name, "adaptive_batching.max_batch_size=16"], anywhere, site)
    assert "batch size grows from 8 to 16 at epoch 0" in output and "ignoring its arguments: every" in output
    assert "what was decided, and why" in output


@pytest.mark.parametrize("is_installed", [True, False])
def test_ranks_find_the_standard_library_first(
    is_installed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Files beside this package, or in the working directory, must not hide its modules."""
    paths: list[str] = []
    monkeypatch.setattr(
        "torchtune._cli.run.Run._run_cmd", lambda self, args: paths.append(os.environ.get("PYTHONPATH", ""))
    )
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(ROOT)] if is_installed else [])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    of_ranks = ("run", "--nproc_per_node", "2", "full_finetune_distributed", "--config", "llama3_2/1B_full")
    assert in_this_process(*of_ranks) == 0
    assert paths == ["" if is_installed else str(ROOT)]


@pytest.mark.wide
def test_a_recipe_searches_the_working_directory_last(tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit('not the standard library')")
    (tmp_path / "mine.py").write_text("")
    program = (
        "import sys; from adaptive_batching.torchtune import entry_point, recipe; sys.argv = ['recipe.py'];"
        "recipe = recipe('full_finetune_distributed')\n"
        "try: entry_point(recipe)()\nexcept SystemExit: pass\nimport mine, random, secrets; print(mine.__file__)"
    )
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "elsewhere/program.py"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert str(tmp_path / "mine.py") in done.stdout, done.stderr


@pytest.mark.parametrize("command", ["run", "probe", "validate", "quickstart"])
def test_help_names_this_program_and_configs_that_exist(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert in_this_process(command, "--help") == 0
    text = capsys.readouterr().out
    assert re.search(r"\btune (?!ls\b)[a-z]|Copyied", text) is None
    assert {*re.findall(r"--config (\w+/\S+)", text)} <= {*config_files()}


def test_a_config_that_only_our_command_knows_by_name_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """``tune run`` hands a name on that it does not know."""
    monkeypatch.setattr(sys, "argv", ["recipe.py", "--config", "quickstart/full_single_device"])
    with pytest.raises(SystemExit, match=r"no config 'quickstart/full_single_device'; .*use 'adaptive-batching run'"):
        entry_point(recipe("full_finetune_single_device"))()


def test_a_run_takes_what_the_probe_command_has_found_for_its_parts(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ["--config", "quickstart/full_single_device", *small_run(inputs, tmp_path, "micro_batch_size=auto")]
    short = [*config, "epochs=1", "max_steps_per_epoch=1"]
    assert in_this_process("probe", "full_finetune_single_device", *short) == 0
    assert "use_maximum_batch_size=False" not in "".join(capsys.readouterr()), "that is what the config has"
    found = (tmp_path / "adaptive_batching" / "probe.json").read_text()
    assert in_this_process("run", "full_finetune_single_device", *short) == 0
    assert (tmp_path / "adaptive_batching" / "probe.json").read_text() == found, "its seconds, too"


@pytest.mark.parametrize(("is_there", "has_gpu"), [(False, False), (True, True)])
def test_the_next_command_of_the_quickstart_fits_the_machine(
    is_there: bool, has_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "_WEIGHTS", tmp_path if is_there else tmp_path / "no")
    shown = commands.what_next("/a/bin/adaptive-batching", "/a/bin/tune", has_gpu=has_gpu)
    assert ("/a/bin/tune download meta-llama/" in shown) != is_there
    assert shown.endswith(" device=cpu dtype=fp32") != has_gpu
    assert commands.program_on_this_machine("no-such-program") == f"{sys.executable} -m adaptive_batching"
    config = OmegaConf.load(config_files()["llama3_2/1B_lora_single_device"])
    assert config.checkpointer.checkpoint_dir.rstrip("/") == "/tmp/Llama-3.2-1B-Instruct"


@pytest.mark.wide
def test_what_a_run_shows(inputs: Path, tmp_path: Path) -> None:
    arguments = ["full_finetune_single_device", "--config", "quickstart/full_single_device", "epochs=1"]
    arguments += shlex.split(small("full", inputs, tmp_path / "out"))
    short = ["max_steps_per_epoch=1", "dtype=bf16"]
    shown = {flag: run(OURS, [flag, *arguments, *short], tmp_path, ROOT) for flag in ("-q", "-v")}
    assert "resolved config" in shown["-v"] and "what was decided" in shown["-v"]
    assert "resolved config" not in shown["-q"] and "is initialized" not in shown["-q"]
    assert "what was decided" not in shown["-q"]
    assert "it/s" in shown["-v"] and not any(bar in shown["-q"] for bar in ("it/s", "s/it", "examples/s"))
    assert not any(
        noise in text for text in shown.values() for noise in ("cpp extensions", "set_vital", "dtype between")
    )
