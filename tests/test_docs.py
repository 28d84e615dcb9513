"""README and docs say nothing that does not hold: links resolve, code runs, settings and commands exist."""

from __future__ import annotations

import argparse
import inspect
import json
import math
import re
import runpy
import shlex
import statistics
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torchtune import _recipe_registry
from torchtune.config._parse import TuneRecipeArgumentParser
from torchtune.config._utils import _merge_yaml_and_cli_args
from torchtune.models.llama2 import llama2

import adaptive_batching
from adaptive_batching import growth
from adaptive_batching.__main__ import COMMANDS
from adaptive_batching._growth.increase import resolve
from adaptive_batching._torchtune.stock.losses import next_token
from adaptive_batching._torchtune.stock.objective import Objective, StockParts
from adaptive_batching._torchtune.train.recipe import AdaptiveBatching
from adaptive_batching._torchtune.train.settings import FIELDS, VALIDATION, read_settings
from tests.conftest import ROOT
from tests.support import fits_table
from tests.support.pages import DOCS, FENCED, PAGES, README, Block, blocks, commands
from tests.support.settings_table import PAGE, page

QUICKSTART = ROOT / "recipes" / "configs" / "quickstart" / "full_single_device.yaml"
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
WORD = re.compile(r"`(\w+)`")
NOT_CHECKED = [". .venv/bin/activate"]
"""Commands that a shell alone knows."""


@pytest.mark.parametrize("path", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda path: path.name)
def test_every_relative_link_resolves(path: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", path.read_text())):
        if link.startswith(("http:", "https:")):
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        assert target.exists(), link
        headings = re.findall(r"^#+ (.*)$", target.read_text(), flags=re.MULTILINE) if anchor else []
        assert anchor in ("", *(re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings)), link


def test_every_page_is_linked_from_the_index_and_the_readme() -> None:
    for index in (README, ROOT / "docs" / "README.md"):
        for path in DOCS:
            assert path.name == "README.md" or f"{path.name})" in index.read_text(), (index.name, path.name)


RESULTS = ROOT / "benchmarks" / "results"


def says(page: str) -> str:
    """The text of a page, with a single space between words."""
    return " ".join((ROOT / page).read_text().split())


def figures(result: str) -> dict[str, Any]:
    """The JSON object that ends a result."""
    found: dict[str, Any] = json.loads((RESULTS / result).read_text().strip().splitlines()[-1])
    return found


def table_of(result: str, head: str) -> dict[str, dict[str, str]]:
    """The table of a result that has a column named ``head``: its rows by their first cell, with cells by column."""
    tables = re.findall(r"(?:^\|.*\n)+", (RESULTS / result).read_text(), flags=re.MULTILINE)
    cells = [[[cell.strip() for cell in line.strip("|\n").split("|")] for line in each.splitlines()] for each in tables]
    [(heads, _, *rows)] = [rows for rows in cells if head in rows[0]]
    return {row[0]: dict(zip(heads, row, strict=True)) for row in rows}


def test_how_close_dry_runs_are_is_what_their_result_says() -> None:
    table = (RESULTS / "dry_run_emulated.md").read_text()
    errors = [float(error) for error, why in re.findall(r"([+-]\d+\.\d\d) % \| ([^|]*) \|$", table, flags=re.MULTILINE)
              if why != "fixes the length"]  # fmt: skip
    middle, most = statistics.median(map(abs, errors)), max(map(abs, errors))
    assert (
        f"{len(errors)} peaks that others have published, the median error is {middle:.2f} %, the worst {most:.1f} %"
        in (says("README.md"))
    )
    assert f"| {len(errors)} | {middle:.2f} % | {most:.1f} % |" in says("docs/how-accurate.md")
    torchtune = [abs(float(error)) for error in re.findall(
        r"([+-]\d+\.\d\d) % \|", (RESULTS / "dry_run_torchtune_emulated.md").read_text()
    )]  # fmt: skip
    shown = f"| {len(torchtune)} | {statistics.median(torchtune):.1f} % | {max(torchtune):.1f} % |"
    assert shown in says("docs/how-accurate.md")
    found = figures("dry_run_emulated.md")
    half, nine = math.ceil(100 * found["time_median_error"]), math.ceil(100 * found["time_p90_error"])
    assert (
        f"{found['time_rows']} published times of a step, half are within {half} % and nine in ten within {nine} %"
        in (says("README.md"))
    )


def test_what_it_gains_on_a_gpu_is_what_the_result_says() -> None:
    rows = table_of("gpu_cuda.md", "whole seconds")
    shown_as = {
        "Trainer": "padded batches of 32",
        "padding_free": "padding-free collator",
        "group_by_length": "`group_by_length`",
        "adaptive": '**`adaptive="auto"`**',
    }
    for name, shown in shown_as.items():
        row = rows[f"Trainer: {name}"]
        [line] = [line for line in README.read_text().splitlines() if re.match(rf"\| (a )?{re.escape(shown)}", line)]
        speed, memory = round(float(row["tokens per second"]), -2), float(row["peak mib"]) / 1024
        shown_cells = [cell.strip(" *") for cell in line.strip("|").split("|")]
        assert shown_cells[1:] == [f"{speed:,.0f}", f"{memory:.1f} GiB", f"{row['set up seconds']} s"], line
    ours, set_up = rows["Trainer: adaptive"], float(rows["Trainer: adaptive"]["set up seconds"])
    page = says("docs/speed-up.md")
    for name, shown in {"Trainer": "padded batches", "padding_free": "a padding-free collator without flash-attn",
                        "group_by_length": "`group_by_length`"}.items():  # fmt: skip
        row = rows[f"Trainer: {name}"]
        saved = float(row["seconds of a late step"]) - float(ours["seconds of a late step"])
        assert f"| {shown} | {(set_up - float(row['set up seconds'])) / saved:.0f} |" in page
        gain = float(ours["tokens per second"]) / float(row["tokens per second"])
        assert f"| {float(row['padded over real']):.1f} | {gain:.1f} |" in page
    found = figures("gpu_cuda.md")
    assert f"| 5.2 | {found['auto_vs_stock']:.1f} |" in page and f"| 1.15 | {found['auto_vs_packed']:.1f} |" in page


def test_figures_of_other_pages_are_what_their_results_say() -> None:
    padded = figures("epoch_time_cpu.md")["speedup_vs_padded"]
    assert f"[{padded} times as long](../benchmarks/results/epoch_time_cpu.md)" in says("docs/split-the-batch.md")
    generated = figures("generated_cpu.md")
    rows = table_of("generated_cpu.md", "seconds of an update")
    page = says("docs/generate.md")
    assert (
        f"| TRL, 4 at once, the most that ran | {float(rows['TRL, 4 at once']['seconds of an update']):.1f} |" in page
    )
    ours = rows["adaptive"]
    assert f"| {float(ours['seconds of an update']):.1f}, after {float(ours['set-up']):.0f} s of set-up |" in page
    assert (
        generated["shrinking_lost"] == 0
        and f"none of {8 * generated['shrinking_updates']} completions was lost" in page
    )
    assert f"| | {generated['by_hand_over_adaptive']:.1f} | [GRPO]" in says("docs/speed-up.md")
    flat = figures("trainer_vs_peers_cpu.md")["seconds_vs_best_peer"]
    for name in ("speed-up", "comparison"):
        assert re.search(rf"{1 / flat:.2f} times as long", says(f"docs/{name}.md"))
    growth = (RESULTS / "growth_quality_cpu.md").read_text().split("## lora")
    page = says("docs/grow-the-batch.md")
    for name in ("replace_lr_decay", "late_switch", "polynomial", "step"):
        [(full, time), (lora, time_of_lora)] = (
            re.findall(rf"^\| {name} \| [^|]* \| \+([\d.]+) [^|]*\| \d+ \| ([\d.]+) ", part, flags=re.MULTILINE)[0]
            for part in growth
        )
        losses = " | ".join(f"+ {float(loss):.2f}" for loss in (full, lora))
        assert re.search(rf"\| `{name}` \| {re.escape(losses)} \| {time} \((LoRA: )?{time_of_lora}\) \|", page), name


PICTURES = runpy.run_path(str(ROOT / "benchmarks" / "pictures.py"))


@pytest.mark.parametrize("name", PICTURES["DRAWN"])
def test_pictures_are_as_they_are_drawn(name: str) -> None:
    assert (PICTURES["PICTURES"] / name).read_text() == PICTURES["DRAWN"][name](), "run make pictures"


def test_results_name_commits_that_exist() -> None:
    git = ["git", "-C", str(ROOT)]
    shallow = subprocess.run(
        [*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True, check=False
    )
    if shallow.stdout.strip() != "false":
        pytest.skip("there is no history here, or only a part of it")
    named = r"(?:; |at |this package's )commits? ([0-9a-f]{7,})(?:-dirty)?(?: to ([0-9a-f]{7,}))?"
    results = (ROOT / "benchmarks" / "results").glob("*.md")
    commits = {commit for path in results for pair in re.findall(named, path.read_text()) for commit in pair if commit}
    assert len(commits) > 10
    asked = "".join(f"{commit}^{{commit}}\n" for commit in sorted(commits))
    found = subprocess.run([*git, "cat-file", "--batch-check"], input=asked, capture_output=True, text=True, check=True)
    assert "missing" not in found.stdout, found.stdout


def test_what_is_said_to_be_tested_names_its_test() -> None:
    cells = [cell for cell in (ROOT / "docs" / "works-with.md").read_text().split("|") if "tested:" in cell]
    assert len(cells) > 10 and all("](../tests/" in cell or "tested: the same" in cell for cell in cells)


def test_the_table_of_cards_is_what_the_configs_say() -> None:
    assert fits_table.PAGE.read_text() == fits_table.page(), "run python -m tests.support.fits_table"


def test_the_page_of_settings_is_what_the_dataclass_says() -> None:
    assert PAGE.read_text() == page(), "run python -m tests.support.settings_table"


def test_every_increase_function_has_a_row_with_its_arguments_and_their_defaults() -> None:
    _, page = (ROOT / "docs" / "grow-the-batch.md").read_text().split("## Functions that come with the package")
    named = {name for cell in re.findall(r"^\| (`.*?) \|", page, flags=re.MULTILINE) for name in WORD.findall(cell)}
    factories = {name for name in growth.__all__ if getattr(growth, name).__module__.endswith(".schedules")}
    assert factories and factories <= named
    for names, _, arguments in re.findall(r"^\| (`.+?) \| (.*?) \| (.*?) ?\|$", page, flags=re.MULTILINE):
        functions = [getattr(growth, name) for name in WORD.findall(names)]
        taken = {key: value for each in functions for key, value in inspect.signature(each).parameters.items()}
        lines = [each if ":" in each else f"{each}: " for each in re.findall(r"`(.+?)`", arguments)]
        shown: Any = OmegaConf.create("\n".join(lines))
        assert set(shown) == set(taken), names
        for key, value in shown.items():
            default = taken[key].default
            if value is not None and default is not inspect.Parameter.empty:
                assert value == default, (names, key)
        if names == "`staged`":  # an example, as there is no default
            growth.staged(**shown)


def parser_of_commands() -> tuple[argparse.ArgumentParser, Any]:
    parser = argparse.ArgumentParser(exit_on_error=False)
    subparsers = parser.add_subparsers()
    for add in COMMANDS.values():
        add(subparsers, "adaptive-batching")
    return parser, subparsers


def test_all_that_say_the_version_agree() -> None:
    version = re.escape(adaptive_batching.__version__)
    for name, before in (("pyproject.toml", 'version = "'), ("CITATION.cff", "version: "), ("CHANGELOG.md", r"## \[")):
        assert re.search(f"^{before}{version}", (ROOT / name).read_text(), flags=re.MULTILINE), name


def test_the_command_of_the_pages_is_installed_and_its_commands_have_a_row() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \|", (ROOT / "docs" / "torchtune-commands.md").read_text(), flags=re.MULTILINE)
    assert set(parser_of_commands()[1].choices) <= set(rows)
    scripts = re.search(r"^\[project.scripts\]\n(.*?)\n\n", (ROOT / "pyproject.toml").read_text(), re.S | re.M)
    assert scripts and scripts[1] == 'adaptive-batching = "adaptive_batching.__main__:main"'


def test_the_rooms_are_there() -> None:
    [tree] = re.findall(
        r"^```text\n(adaptive_batching/.*?)```$", (ROOT / "docs" / "internals.md").read_text(), re.DOTALL | re.MULTILINE
    )
    for indent, names in re.findall(r"^( {0,4})(\w[\w./, ]*?)(?: {2,}.*)?$", tree, flags=re.MULTILINE):
        for name in names.split(", "):
            assert (ROOT / ("adaptive_batching" if indent else "") / name).exists(), name


# Python


# Whole training runs are in tests/loop/test_page.py, tests/transformers/test_trl.py and test_examples.py.
@pytest.mark.parametrize(
    "block",
    [
        block
        for block in blocks("python")
        if not re.search(
            "AdaptiveStep|SFTTrainer|GRPOTrainer" if block.page != "README.md" else "GRPOTrainer", block.text
        )
    ],
    ids=str,
)
def test_python_runs(
    block: Block, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.Linear(512, 8), nn.ReLU(), nn.Linear(8, 1))
    before = [parameter.clone() for parameter in model.parameters()]
    # The names that a block may rely on, as the prose says.
    given: dict[str, Any] = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "__name__": "docs"}
    exec(compile(block.text, block.where, "exec", dont_inherit=True), given)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    if "result" in given:
        assert given["result"].batch_size == 4096
    if "StorageWeakRef" in given:
        assert capsys.readouterr().out == "False\nTrue\n"
    if "WithPenalty" in given:
        check_that_parts_add_up(given["Recipe"])


def check_that_parts_add_up(recipe: type[AdaptiveBatching]) -> None:
    """The objective of a page gives parts of a batch their share, so that a split batch has the same gradient."""
    torch.manual_seed(0)
    model = llama2(vocab_size=50, num_layers=1, num_heads=2, num_kv_heads=2, embed_dim=16, max_seq_len=32).double()

    def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
        return {key: torch.tensor([sample[key] for sample in samples]) for key in ("tokens", "labels")}

    parts = StockParts(collate, nn.CrossEntropyLoss(ignore_index=-100), torch.enable_grad(), 0)
    tokens = torch.randint(50, (3, 8)).tolist()
    samples = [{"tokens": row, "labels": [-100] * n + row[n:]} for n, row in enumerate(tokens)]

    def gradient(objective: Objective, split: list[list[Any]]) -> torch.Tensor:
        model.zero_grad()
        whole = objective.counts(samples)
        for part in split:
            weight = (
                None if len(split) == 1 else objective.counts(part).terms * objective.weight_of(whole) / whole.terms
            )
            objective.loss(model, objective.collate(part), weight)[0].backward()
        assert model.output.weight.grad is not None
        return model.output.weight.grad.clone()

    def of_penalty(split: list[list[Any]]) -> torch.Tensor:
        return gradient(recipe.make_objective(parts), split) - gradient(next_token(parts), split)

    whole = of_penalty([samples])
    assert whole.abs().sum() > 0
    torch.testing.assert_close(of_penalty([samples[:1], samples[1:]]), whole, rtol=1e-4, atol=1e-12)


# YAML


def settings_of(block: Block) -> dict[str, Any]:
    found: Any = OmegaConf.to_container(OmegaConf.create(block.text))
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_yaml_holds_known_settings(block: Block) -> None:
    fields = settings_of(block)
    base = OmegaConf.load(QUICKSTART)
    assert set(fields) <= {*FIELDS, *VALIDATION, *map(str, base)}
    settings = read_settings(OmegaConf.create({**base, "batch_increase_function": None, **fields}))
    if isinstance(settings.batch_increase_function, dict):
        resolve(settings.batch_increase_function)


# Commands


@pytest.mark.parametrize(("where", "command"), list(commands()))
def test_commands_name_what_exists(where: str, command: str) -> None:
    words = shlex.split(command)
    while "=" in words[0]:  # variables of the environment
        words = words[1:]
    if shlex.join(words) in NOT_CHECKED:
        return
    program, *rest = words
    if program == "make":
        [target, *variables] = rest
        assert target in TARGETS
        assert all(re.fullmatch(r"[A-Z]+=\S+", variable) for variable in variables)
    elif program == "pip":
        [(extra,)] = [re.findall(r"^\.(?:\[(\w+)\])?$", rest[1])]
        assert rest[0] == "install" and (not extra or f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text())
    elif program == "python" and rest[0] == "-m" and rest[1] != "adaptive_batching":
        assert find_spec(rest[1]) is not None
    elif program == "python" and rest[0] != "-m":
        assert (ROOT / rest[0]).is_file()
    elif program in ("adaptive-batching", "tune") or rest[:2] == ["-m", "adaptive_batching"]:
        check_tune(rest[2:] if program == "python" else rest, ours=program != "tune")
    else:
        pytest.fail(f"{where}: nothing is known of {program!r}; check it, or add it to NOT_CHECKED")


def test_make_targets_in_the_text_exist() -> None:
    for path in (*PAGES, ROOT / "CONTRIBUTING.md"):
        assert set(re.findall(r"`make ([a-z-]+)", path.read_text())) <= TARGETS, path.name


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep torchtune's list of recipes as it is for other tests."""
    monkeypatch.setattr(_recipe_registry, "_ALL_RECIPES", [*_recipe_registry._ALL_RECIPES])


def check_tune(arguments: list[str], *, ours: bool) -> None:
    """Check that a command line is parsed, and that the recipe, the config and the overrides that it names exist."""
    parser, _ = parser_of_commands()
    known = {recipe.name: recipe for recipe in _recipe_registry.get_all_recipes()}
    configs = {config.name: config for recipe in known.values() for config in recipe.configs}
    if not ours and arguments[0] == "cp":
        assert arguments[1] in configs
        return
    args = parser.parse_args(arguments)
    if arguments[0] == "validate":  # a file that another command of the pages makes
        assert str(args.config) in [words[-1] for _, line in commands() if (words := line.split())[1:2] == ["cp"]]
    elif arguments[0] == "run":
        check_run(args, known, ours=ours)


def check_run(args: Any, known: dict[str, Any], *, ours: bool) -> None:
    name = Path(args.recipe).stem
    assert name in known, args.recipe
    if not (ours and args.recipe == name):
        assert (ROOT / args.recipe.removeprefix("adaptive_batching/")).is_file(), args.recipe
    option, config, *overrides = args.recipe_args
    assert option == "--config"
    path = Path(config)
    if not path.suffix:
        [found] = [each for each in known[name].configs if each.name == config]
        path = Path(_recipe_registry.__file__).parent.parent / "recipes" / "configs" / found.file_path
    several = [getattr(args, flag) for flag in ("nproc_per_node", "nnodes")]
    assert known[name].supports_distributed == (several != ["1", "1:1"])
    from_yaml, from_line = TuneRecipeArgumentParser().parse_known_args(["--config", str(path), *overrides])
    assert all("=" in override for override in overrides)
    read_settings(_merge_yaml_and_cli_args(from_yaml, from_line))
