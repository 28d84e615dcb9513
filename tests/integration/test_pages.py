"""The commands, settings, recipes and output that the README and ``docs/`` show: they are run.

:data:`COMMANDS` says how each command is run, :data:`SIZES` what comes of each group of settings. What is new in a page
needs an entry. ``tests/test_docs.py`` runs the Python, and checks what can be checked without a run.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import adaptive_batching.torchtune
from adaptive_batching._ranks.fsdp import why_not_drained
from adaptive_batching._report.record import Report
from tests.conftest import ROOT, TuneRun
from tests.integration.faults import disarm, plan
from tests.support.command_line import in_shell, in_this_process, make_environment, small
from tests.support.environment import OF_THE_RECIPES
from tests.support.pages import PAGES, Block, blocks, commands, commands_in_the_text, loops
from tests.support.records import events, without_sizes
from tests.support.runs import write_run

TABLE = "what was decided, and why"


@dataclass(frozen=True)
class Shell:
    """A command that a shell runs as it stands, with overrides added for a small model."""

    says: str = TABLE
    added: str | None = None  # to it, where not overrides of a config
    instead: Mapping[str, str] = field(default_factory=dict)  # of other hosts, of more than two devices, of dots
    folder: str = "."  # where it runs, in a checkout
    marks: Sequence[pytest.MarkDecorator] = (pytest.mark.wide,)


@dataclass(frozen=True)
class Here:
    """A command of this package that runs in this process, which takes a tenth of the time."""

    says: str
    instead: Mapping[str, str] = field(default_factory=dict)  # of a file of the user's


@dataclass(frozen=True)
class Elsewhere:
    """A command that the test of this name runs."""

    test: str


RUN = "adaptive-batching run"
LORA = "lora_finetune_single_device --config llama3_2/1B_lora_single_device"
FULL = "full_finetune_single_device --config quickstart/full_single_device"
MANY = "full_finetune_distributed --config llama3_1/8B_full use_maximum_batch_size=True"
PLAN = "adaptive-batching plan"
REPORTS = "test_reports_are_made_as_shown"
# One of each kind is run. A text is why another is not; of a target of make, what it would run is looked at.
ALIKE = "another one of its kind is run"
DRY_RUN = "needs a CUDA build of torch; tests/emulated/test_dry_run*.py run its like"
COMMANDS: dict[str, Shell | Here | Elsewhere | str] = {
    f"adaptive-batching probe {FULL}": ALIKE,
    "tune cp llama3_2/1B_lora_single_device my_config.yaml": Shell("Copied file to my_config.yaml", added=""),
    "adaptive-batching validate my_config.yaml": Here(
        "Config is well-formed!",
        instead={"my_config.yaml": str(ROOT / "recipes/configs/quickstart/full_single_device.yaml")},
    ),
    f"{PLAN} llama3_1/8B_lora_single_device --gpu 4090 --sequence-length 2048": (
        "needs a CUDA build of torch; tests/emulated/test_plan.py has its like"
    ),
    "adaptive-batching quickstart": Shell("Next, with a config of your own", "epochs=1 dataset.split=train[:24]"),
    f"{RUN} {LORA} micro_batch_size=auto": Shell(),
    f"{RUN} {LORA} use_maximum_batch_size=True": ALIKE,
    f"{RUN} {FULL} epochs=2": ALIKE,
    f"tune run adaptive_batching/recipes/{LORA.replace(' ', '.py ', 1)} micro_batch_size=auto": ALIKE,
    "tune run adaptive_batching/recipes/full_finetune_single_device.py --config ...": ALIKE,
    "PYTHONPATH=. tune run recipes/full_finetune_single_device.py --config ...": ALIKE,
    "tune run full_finetune_single_device.py --config ...": Shell(
        instead={"...": "configs/quickstart/full_single_device.yaml"}, folder="recipes"
    ),
    f"{RUN} {FULL} epochs=3 resume_from_checkpoint=True": "tests/integration/test_checkpoints.py has its like",
    "PYTHONPATH=. tune run --nproc_per_node 2 recipes/full_finetune_distributed.py "
    "--config recipes/configs/quickstart/full_single_device.yaml epochs=2": ALIKE,
    f"{RUN} --nproc_per_node 8 {MANY}": Shell(  # test_two_ranks.py has one that fails
        instead={"--nproc_per_node 8": "--nproc_per_node 2"}, marks=[pytest.mark.slow]
    ),
    f"{RUN} --nnodes 2 --nproc_per_node 8 --rdzv_id 1 --rdzv_backend c10d --rdzv_endpoint node0:29500 {MANY}": (
        "tests/integration/test_two_ranks.py has two agents"
    ),
    "pip install '.[torchtune]'": "tests/integration/test_launch.py installs a wheel",
    "pip install .": Elsewhere("test_without_torchtune_the_core_works_and_the_command_line_says_what_is_missing"),
    "pip install '.[transformers]'": "tests/transformers needs what it installs",
    "adaptive-batching report outputs/quickstart/full_single_device": Elsewhere(REPORTS),
    "adaptive-batching report outputs/first outputs/second --output compare.html": Elsewhere(REPORTS),
    ". .venv/bin/activate": Elsewhere("test_what_make_has_made_is_activated"),
    "make quickstart": Elsewhere("test_make_quickstart_shows_all_that_the_pages_say"),
    "adaptive-batching dry-run --gpu 4090 -- python train.py --batch-size 8": DRY_RUN,
    "adaptive-batching dry-run --gpu 4090 -- python train.py": DRY_RUN,
    "adaptive-batching dry-run --gpu 4090 --largest -- python train.py --batch-size '{batch_size}'": DRY_RUN,
    "adaptive-batching dry-run --gpu H100 -- torchrun --nproc_per_node 8 train.py": DRY_RUN,
    "adaptive-batching dry-run --memory 24210MiB --capability 8.6 -- python train.py": DRY_RUN,
    "adaptive-batching dry-run --gpu A100 --sequence-length 2048 lora_finetune_single_device --config "
    "llama3_1/8B_lora_single_device use_maximum_batch_size=True": DRY_RUN,
    "adaptive-batching dry-run --gpu 4090 --gpu L40S --gpu H100 --tokens 1e8 --price 0.4 --price 0.9 "
    "--price 2.5 --sequence-length 2048 lora_finetune_single_device --config "
    "llama3_1/8B_lora_single_device gradient_accumulation_steps=1": DRY_RUN,
    f"{RUN} -- llamafactory-cli train train.yaml": "tests/transformers/test_frameworks.py has its like",
    f"{RUN} -- llamafactory-cli train x.yaml": "tests/transformers/test_frameworks.py has its like",
    "python train.py": "any script; tests/transformers/test_adopt.py has one",
    "python -I": "an option of Python's",
    "python -S": "an option of Python's",
    "python -m tests.support.stacks": "tests/transformers/test_frameworks.py calls what it calls",
    "python examples/grpo.py": "tests/transformers/test_examples.py runs it",
    "adaptive-batching padding data/quickstart/train.json --batch-size 16": "tests/test_padding.py has its like",
    "pip install '.[transformers]' trl": "tests/transformers needs what it installs",
    "adaptive-batching padding": "tests/test_padding.py has its like",
    "adaptive-batching run -- COMMAND": "any command; tests/transformers/test_adopt.py has one",
    "make test-stacks": "these take environments of their own",
    "make test-stacks-all": "these take environments of their own",
    "make test": "this test is one of those that it runs",
    "make test-wide": "this test is one of those that it runs",
    "make test-emulated-wide": "this takes an environment of its own, with a CUDA build of torch",
    "make bench": "takes more than an hour",
    "make bench DEVICE=cuda": "needs a GPU",
    "make test-cuda": "needs a GPU",
}


def all_commands() -> set[str]:
    return {command for _, command in commands()} | {c for path in PAGES for c in commands_in_the_text(path)}


def those(kind: type) -> list[Any]:
    return [
        pytest.param(command, way, id=command[:80], marks=way.marks if isinstance(way, Shell) else [])
        for command, way in COMMANDS.items()
        if isinstance(way, kind)
    ]


def test_each_command_is_run() -> None:
    assert set(COMMANDS) == all_commands()
    assert all(way.test in globals() for way in COMMANDS.values() if isinstance(way, Elsewhere))


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout whose ``.venv`` has all that ``make`` would install."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("Makefile", "adaptive_batching", "benchmarks", "pyproject.toml", "recipes", "tests"):
        (folder / name).symlink_to(ROOT / name)
    make_environment(folder / ".venv", checkout=folder)
    for extra in ("torchtune", "dev", "bench"):
        (folder / ".venv" / f".{extra}").touch()
    return folder


def finish(process: Any, status: int = 0) -> str:
    output: str = process.communicate(timeout=600)[0]
    assert process.returncode == status, output[-6000:]
    return output


@pytest.mark.parametrize(("command", "way"), those(Shell))
def test_a_command_runs_as_it_stands(command: str, way: Shell, checkout: Path, inputs: Path, tmp_path: Path) -> None:
    if "nproc_per_node" in command and (why := why_not_drained()):
        pytest.skip(why)
    line = command
    for shown, real in way.instead.items():
        assert shown in line
        line = line.replace(shown, real)
    added = small(command, inputs, tmp_path / "out") if way.added is None else way.added
    output = finish(in_shell(f"{line} {added}", checkout / way.folder, checkout / ".venv"))
    assert way.says in output, output[-6000:]


@pytest.mark.parametrize(("command", "way"), those(Here))
def test_a_command_that_starts_no_run(
    command: str, way: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for shown, real in way.instead.items():
        command = command.replace(shown, real)
    assert in_this_process(*shlex.split(command)[1:]) == 0
    assert way.says in capsys.readouterr().out


def test_reports_are_made_as_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in (command for command in COMMANDS if command.startswith("adaptive-batching report")):
        for folder in (word for word in command.split() if word.startswith("outputs/")):
            write_run(Report(Path(folder, "adaptive_batching")), all_there_is=False)
        assert in_this_process(*shlex.split(command)[1:]) == 0
        assert "<title>" in Path(capsys.readouterr().out.strip()).read_text()


@pytest.mark.parametrize("command", sorted(command for command in COMMANDS if command.startswith("make ")))
def test_a_target_runs_what_there_is(command: str, checkout: Path) -> None:
    """With an environment to make, and with one that is there already, where nothing is installed."""
    for added, installs in (("VENV=nowhere", True), ("PYTHON=python3", False)):
        lines = finish(in_shell(f"{command} --dry-run {added}", checkout, checkout / ".venv"))
        extras = re.findall(r"pip install .* --editable '\.(?:\[(\w+)\])?'", lines)
        assert bool(extras) == installs and set(extras) <= {"", *optional_dependencies()}, lines
        modules = set(re.findall(r"python3? -m ([\w.]+)", lines)) - {"venv", "pip"}
        files = [
            file for file in re.findall(r"[^\s']+\.py\b", lines) if not file.startswith("torchaudio/")
        ]  # which it makes
        assert modules or files
        assert all(find_spec(module) for module in modules if module not in ("mypy", "ruff")), modules
        assert all((ROOT / file).is_file() for file in files), files


def optional_dependencies() -> set[str]:
    section = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]\n")[1].split("\n\n")[0]
    return set(re.findall(r"^(\w+) =", section, flags=re.MULTILINE))


@pytest.mark.slow
def test_without_torchtune_the_core_works_and_the_command_line_says_what_is_missing(tmp_path: Path) -> None:
    venv = tmp_path / ".venv"
    make_environment(venv)
    for name in OF_THE_RECIPES:
        for path in (venv / "packages").glob(f"{name}*"):
            path.unlink()
    collected = re.findall(r"Collecting ([\w-]+)", finish(in_shell("pip install .", ROOT, venv)))
    assert not {"torch", *OF_THE_RECIPES} & set(collected)
    (tmp_path / "loop.py").write_text("\n".join(loops()))
    (tmp_path / "model.py").write_text((ROOT / "tests" / "support" / "small_model.py").read_text())
    (tmp_path / "train.py").write_text(
        "import torch\nfrom model import make_data, make_model\ndata, model = make_data(), make_model()\n"
        "optimizer = torch.optim.SGD(model.parameters())\nexec(open('loop.py').read())\nstep(data)\n"
    )
    assert finish(in_shell("python train.py", tmp_path, venv)).count("tensor(") == 32
    missing = finish(in_shell("adaptive-batching validate x", tmp_path, venv), status=2)
    assert "is not installed; pip install '.[torchtune]' in" in missing
    assert "Traceback" not in missing


@pytest.mark.slow
def test_make_quickstart_shows_all_that_the_pages_say(checkout: Path) -> None:
    """A small model, data and a tokenizer; a probe, growth, one recovery, checkpoints and the table."""
    output = finish(in_shell("make quickstart", checkout, checkout / ".venv"))
    made = ["tokenizer.model", "train.json", "model/model.safetensors"]
    assert all((checkout / "data" / "quickstart" / name).is_file() for name in made)
    assert [*(checkout / "outputs" / "quickstart").glob("*/epoch_*/*.safetensors")]
    assert "running the step's samples again" in output and TABLE in output


def test_what_make_has_made_is_activated(checkout: Path) -> None:
    assert str(checkout / ".venv") in finish(in_shell(". .venv/bin/activate; command -v tune", checkout, Path("/usr")))


# Settings

SIZES: dict[str, list[list[int] | None]] = {
    "README.md": [[4, 8]],
    "docs/split-the-batch.md": [[4, 4]],
    "docs/find-the-largest-batch.md": [[32, 32]],
    "docs/grow-the-batch.md": [[4, 12], [4, 4, 8]],
    "docs/settings.md": [[4, 4]],
    "docs/survive.md": [None, None],
    "docs/torchtune-differences.md": [None],
    "docs/torchtune-validation.md": [None],
}
"""Batch size of each epoch, of each block of a page in turn, where the config has 4. None where nothing changes."""


def schedules() -> str:
    """The increase functions of a page, as a module."""
    return "\n\n".join(block.text for block in blocks("python") if block.page == "docs/grow-the-batch.md")


def test_each_group_of_settings_is_run() -> None:
    shown = [block.page for block in blocks("yaml")]
    assert {page: shown.count(page) for page in shown} == {page: len(sizes) for page, sizes in SIZES.items()}


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_settings_do_in_a_run_what_the_page_says(
    block: Block, tune_run: TuneRun, baseline: TuneRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_schedules.py").write_text(schedules())
    monkeypatch.syspath_prepend(tmp_path)
    sizes = SIZES[block.page][[other for other in blocks("yaml") if other.page == block.page].index(block)]
    settings: Any = OmegaConf.to_container(OmegaConf.create(block.text))
    run = tune_run("full", f"epochs={len(sizes or [4, 4])}", replaced=settings)
    if sizes is None:
        logged = run.metrics
        assert any("val_loss" in step for step in logged) == ("dataset_val" in settings)
        assert (
            without_sizes([step for step in logged if "val_loss" not in step]) == baseline("full", stock=True).metrics
        )
    else:
        assert [epoch["batch_size"] for epoch in events(run, "epoch")] == sizes
        assert len(events(run, "probe")) == 1, "no block has max_batch_size"


# Recipes


@pytest.mark.parametrize("name", ["WithPenalty", "Alarm"])
def test_a_recipe_that_help_shows_runs(
    name: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = re.findall(r"(?m)^(?: {4}.*\n|\n)+", adaptive_batching.torchtune.__doc__ or "")
    [text] = [textwrap.dedent(text) for text in shown if f"class {name}(" in text]
    (tmp_path / "my_recipe.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    disarm()
    plan.update(call=3, times=1)
    kind = "lora" if "lora_finetune" in text else "full"
    line = f"run my_recipe.py --config quickstart/{kind}_single_device epochs=1 use_maximum_batch_size=False"
    line += " adaptive_batching.recover_from_oom=True" if name == "Alarm" else ""
    line += f" batch_increase_function=null model._component_=tests.integration.faults.{kind}_model"
    assert in_this_process(*shlex.split(f"{line} {small(line, inputs, tmp_path / 'out')}")) == 0
    assert ("step 3: 1 recoveries so far" in capsys.readouterr().out) == (name == "Alarm")


# Output

OUTPUT = "docs/split-the-batch.md"


def test_output_is_as_shown_numbers_aside(tune_run: TuneRun, caplog: pytest.LogCaptureFixture) -> None:
    """Packed, so that all that is timed are numbers."""
    assert {block.page for block in blocks("")} == {OUTPUT}
    [shown] = [block.text for block in blocks("") if block.page == OUTPUT]
    caplog.set_level("INFO", "adaptive_batching")
    few = ["dataset.packed=True", "epochs=1", "batch_size=2", "adaptive_batching.memory_limit=8GiB"]
    tune_run("full", "micro_batch_size=explore", *few)
    pattern = re.sub(r"\d+(\\\.\d+)?", r"[\\d.]+", re.escape(shown))
    assert any(re.search(pattern, message) for message in caplog.messages), pattern
