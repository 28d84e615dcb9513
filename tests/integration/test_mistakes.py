"""Mistakes, as people make them: each ends in one line with key, value and remedy, before training."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, error_handler
from torchtune._cli.run import Run

from adaptive_batching import ConfigError
from adaptive_batching.__main__ import COMMANDS, main
from adaptive_batching._torchtune.cli.launch import mistakes_in_one_line
from adaptive_batching._torchtune.names import config_files
from adaptive_batching.torchtune import load_stock
from recipes import full_finetune_single_device as full
from recipes import lora_dpo_single_device as lora_dpo
from recipes import lora_finetune_single_device as lora
from tests import conftest
from tests.conftest import RECIPES, ROOT, TuneRun
from tests.support.command_line import in_this_process
from tests.support.html import read_page
from tests.support.overrides import RECOVER

CONFIGS = ROOT / "recipes" / "configs" / "quickstart"
OURS = "adaptive_batching"
FUNCTION = "batch_increase_function"
HERE = "tests.integration.test_mistakes"
VAL = "dataset_val._component_=torchtune.datasets.instruct_dataset"
PLATEAU = f"{FUNCTION}=adaptive_batching.growth.on_plateau ~{FUNCTION}.every"
LORA = "llama3_2/1B_lora_single_device"
QUICKSTART = "quickstart/full_single_device"
PLAN = f"plan {LORA}"


def one_argument(epoch: int) -> int:
    return 1


def fails_at_once(epoch: int, current_batch_size: int) -> int:
    raise RuntimeError("not today")


def returns_a_float(epoch: int, current_batch_size: int) -> float:
    return 2.0


def takes_start(start: int) -> None:
    return None


def factory(every: int = 1, reads_state: bool = False) -> Any:
    if reads_state:
        return lambda epoch, current_batch_size, state: "two" if epoch else 0
    return lambda epoch, current_batch_size: "two" if epoch else 0


# Files that are there, in the working directory.
FILES: dict[str, bytes] = {
    "list.yaml": b"- 1\n- 2\n",
    "broken.yaml": b"a: [1,\n b: }",
    "binary.yaml": bytes(range(256)),
    "empty.yaml": b"",
    "nothing.yaml": (ROOT / "recipes/configs/quickstart/full_single_device.yaml")
    .read_bytes()
    .replace(b"${data_dir}", b"${nowhere}"),
    "no_loss.yaml": b"loss: {_component_: torch.nn.NoLoss}",
    "wrong_loss.yaml": b"loss: {_component_: torch.nn.CrossEntropyLoss, ignore: 1}",
    "no_record.jsonl": b"nothing\n",
    "later.jsonl": b'{"event": "run", "version": 99}\n',
    "ended.jsonl": b'{"event": "end", "time": "2026-01-01T00:00:00+00:00"}\n',
}

# (command, words that its last line has to have)
MISTAKES: list[tuple[str, list[str]]] = [
    # names
    ("runn", ["no command 'runn'", "did you mean 'run'"]),
    ("validat", ["did you mean 'validate'"]),
    (f"run lora_finetune_single_devic --config {LORA}", ["no recipe", "did you mean 'lora_finetune_single_device'"]),
    (f"run {LORA} --config {LORA}", ["is a config, not a recipe; run it with lora_finetune_single_device"]),
    ("run lora_finetune_single_device --config llama3_2/1B_lora_single_devic", [f"did you mean '{LORA}'"]),
    (f"probe full_finetune_single_devic --config {QUICKSTART}", ["did you mean 'full_finetune_single_device'"]),
    (f"validate {QUICKSTART} --recipe full_finetune_single_devic", ["did you mean 'full_finetune_single_device'"]),
    ("validate lora_finetune_single_device", ["is a recipe, not a config"]),
    ("plan llama3_2/1B_lora_single_devic --gpu 4090", [f"did you mean '{LORA}'"]),
    (
        f"plan lora_finetune_single_devic --config {LORA} --gpu 4090",
        ["no recipe", "did you mean 'lora_finetune_single_device'"],
    ),
    (f"{PLAN} --gpu 4091", ["--gpu '4091' is unknown", "RTX 4090", "--memory 24GiB"]),
    (f"{PLAN} --gpu ''", ["--gpu ''", "known: ", "RTX 4090"]),
    # what is missing, and what is too much
    ("run", ["required: recipe"]),
    ("run lora_finetune_single_device", ["--config <name or path> is missing"]),
    ("run lora_finetune_single_device --config", ["--config <name or path> is missing"]),
    (f"run lora_finetune_single_device --confg {LORA}", ["--config <name or path> is missing"]),
    ("probe full_finetune_single_device", ["--config <name or path> is missing"]),
    ("validate", ["required: config;"]),
    ("plan --gpu 4090", ["name a config", "'tune ls' lists", "--gpu 4090"]),
    ("ls", ["no command 'ls'"]),
    ("env all", ["unrecognized arguments: all"]),
    (f"{PLAN} --memry 24", ["unrecognized arguments: --memry"]),
    # values
    (f"{PLAN} --micro-batch-size auto", ["unrecognized arguments", "write micro_batch_size=auto"]),
    (f"{PLAN} --memory-limit=40GiB", ["unrecognized arguments", "write adaptive_batching.memory_limit=40GiB"]),
    (f"{PLAN} --memory lots", ["--memory lots", "write 24GiB, or 24"]),
    (f"{PLAN} --memory 24 --gpu 4090", ["--gpu: not allowed with argument --memory"]),
    (f"{PLAN} --sequence-length long", ["--sequence-length", "'long'"]),
    (f"{PLAN} --sequence-length 0", ["--sequence-length 0 must be at least 1"]),
    (f"{PLAN} --gpus 0", ["--gpus 0 must be at least 1"]),
    (f"{PLAN} --memory 24 batch_size", ["'batch_size' is not an override", "key=value"]),
    (f"run --nproc_per_node 0 full_finetune_distributed --config {QUICKSTART}", ["--nproc_per_node 0", "at least 1"]),
    (f"run --nproc_per_node two full_finetune_distributed --config {QUICKSTART}", ["--nproc_per_node two"]),
    (f"run --nproc_per_node 2 full_finetune_single_device --config {QUICKSTART}", ["does not support distributed"]),
    (f"validate {QUICKSTART} ~no_such_key", ["~no_such_key cannot be read", "no_such_key"]),
    # plans
    (f"plan full_finetune_singel_device {QUICKSTART} --gpu 4090", ["did you mean 'full_finetune_single_device'"]),
    (f"plan full_finetune_single_device lora_dpo_single_device --config {QUICKSTART} --gpu 4090", ["write key=value"]),
    ("plan --config llama3/8B_qat_full --devices 1 --gpu 4090", ["torchtune has no qat_single_device"]),
    # what only stock reads
    (f"validate {QUICKSTART} ~resume_from_checkpoint", ["lacks a key", "Missing key resume_from_checkpoint"]),
    (f"validate {QUICKSTART} ~compile ~seed", ["lacks a key", "Missing key"]),
    (f"validate {QUICKSTART} --recipe ppo_full_finetune_single_device", ["lacks a key", "Missing key value_"]),
    (f"validate {QUICKSTART} resume_from_checkpoint=perhaps", ["resume_from_checkpoint='perhaps'", "True or False"]),
    (f"validate {QUICKSTART} enable_activation_offloading=True", ["torchtune refuses", "when training on CUDA"]),
    (f"validate {QUICKSTART} optimizer_in_bwd=True", ["torchtune refuses this config", "clip_grad_norm=None"]),
    # what only its recipe reads
    (
        "validate mistral/7B_full_ppo_low_memory micro_batch_size=explore",
        ["=explore does not work with PPO", "write auto"],
    ),
    # dry runs
    ("dry-run --gpu 4090", ["the command is missing"]),
    ("dry-run --gpu 409 -- python x", ["--gpu '409' is unknown; the closest: RTX 4090"]),
    ("dry_run --gpu 409 -- python x", ["--gpu '409' is unknown; the closest: RTX 4090"]),
    (f"plan {LORA} --gpuu 4090", ["unrecognized arguments: --gpuu 4090; did you mean '--gpu'?"]),
    (f"plan {LORA} --sequence_length many", ["argument --sequence-length: invalid int value: 'many'"]),
    (
        f"run my/full_finetune_single_device.py --config {LORA}",
        ["the file 'my/full_finetune_single_device.py' does not"],
    ),
    ("plan quickstart/full_single_device --gpu A100 --levers", ["--levers is for one card, and --gpu names 2; name"]),
    ("dry-run --memory lots -- python x", ["--memory lots is not a memory size"]),
    ("dry-run --memory 24 --steps 0 -- python x", ["--steps 0 must be at least 1"]),
    ("dry-run --memory 24 --max-seconds 0 -- python x", ["--max-seconds 0 must be more than 0"]),
    ("dry-run --memory 24 --sequence-length 0 -- python x", ["--sequence-length 0 must be at least 1"]),
    ("dry-run --memory 24 --devices 40 -- python x", ["--devices 40 must be 1 to 16"]),
    ("dry-run --memory 24 -- torchrun --nproc-per-node=40 x", ["--devices 40 must be 1 to 16"]),
    ("dry-run --memory 24 --capability new -- python x", ["--capability new"]),
    ("dry-run --memory 24 --page no/such.html -- python x", ["there is no folder"]),
    ("dry-run -- python x", ["give the card by --gpu, --card or --memory"]),
    ("dry-run --gpu 4090 --memory 24 -- python x", ["--gpu, --card or --memory, one of them"]),
    ("dry-run --card no.json -- python x", ["--card no.json: No such file or directory; name another file"]),
    (f"dry-run --card {__file__} -- python x", ["test_mistakes.py is not JSON"]),
    ("dry-run --gpu 4090 --gpu t4 --price 1 --price 2 --price 3 -- python x", ["--price is given 3 times for 2 cards"]),
    ("dry-run --gpu 4090 --price 0 -- python x", ["--price 0 must be more than 0"]),
    ("dry-run --gpu 4090 --epochs 0 -- python x", ["--epochs 0 must be more than 0"]),
    ("dry-run --gpu 4090 --steps-in-all 0 -- python x", ["--steps-in-all 0 must be at least 1"]),
    ("dry-run --gpu 4090 --tokens 1e9 --no-time -- python x", ["--tokens has no effect with --no-time"]),
    ("dry-run --gpu 4090 --price 2 --whole -- python x", ["--price has no effect with --whole"]),
    ("dry-run --memory 24 --tokens 1e9 -- python x", ["--tokens has no effect with --memory"]),
    (f"dry-run --gpu 4090 --epochs 3 lora_finetune_single_device --config {LORA}", ["--epochs 3: a recipe's data"]),
    ("dry-run --gpu 4090 --correction 1.1 -- python x", ["--correction 1.1 must be card= or host="]),
    ("dry-run --gpu 4090 --calibrate no.jsonl -- python x", ["--calibrate no.jsonl: there is no such file"]),
    ("dry-run --gpu 4090 --batch-sizes 4,x -- python x", ["--batch-sizes 4,x must be numbers from 1 on"]),
    ("dry-run --gpu 4090 --gpu t4 --batch-sizes 4,8 -- python x", ["are compared on one card, and 2 are given"]),
    ("dry-run --gpu 4090 --batch-sizes 4,8 -- python x", ["--batch-sizes needs {batch_size} in the command"]),
    (f"dry-run --memory 24 {__file__} --lr 1", [f"to run a script, write -- python {__file__}"]),
    ("dry-run --memory 24 lora_finetune_single --config x", ["did you mean 'lora_finetune_single_device'"]),
    ("dry-run --memory 24 lora_finetune_single_device", ["--config <name or path> is missing"]),
    (f"dry-run --memory 24 --devices 2 lora_finetune_single_device --config {LORA}", ["--devices 2"]),
    (f"dry-run --memory 24 lora_finetune_single_device --config {LORA} batch", ["write key=value"]),
    # files
    ("validate llama3_1/8B_full optimizer_in_bwd=True micro_batch_size=auto", ["several devices", "_in_bwd=F"]),
    ("validate missing.yaml", ["the file 'missing.yaml' does not exist"]),
    ("validate folder", ["no config 'folder'"]),
    ("validate list.yaml", ["list.yaml is not a config: it must map keys to values"]),
    ("validate broken.yaml", ["broken.yaml cannot be read", "in line 2"]),
    ("validate binary.yaml", ["binary.yaml cannot be read", "utf-8"]),
    ("validate empty.yaml", ["empty.yaml: the config lacks"]),
    ("validate no_loss.yaml", ["NoLoss", "no_loss.yaml"]),
    ("validate wrong_loss.yaml", ["CrossEntropyLoss", "ignore"]),
    ("validate nothing.yaml", ["'nowhere' not found"]),
    ("run lora_finetune_single_device --config list.yaml", ["list.yaml is not a config: it must map keys to values"]),
    (f"run folder --config {LORA}", ["no recipe 'folder'"]),
    ("plan list.yaml --memory 24", ["list.yaml is not a config: it must map keys to values"]),
    ("plan empty.yaml --memory 24", ["empty.yaml has no model"]),
    ("report", ["there is no record of a run below"]),
    ("report folder", ["there is no record of a run in folder", "output_dir"]),
    ("report later.jsonl", ["is a record of version 99, but this adaptive-batching reads"]),
    ("report ended.jsonl --output /nowhere/x.html", ["name another file with --output"]),
    ("report no_record.jsonl", ["no_record.jsonl has no events"]),
    ("quickstart --data_dir binary.yaml", ["--data_dir binary.yaml", "name another folder"]),
]

# Overrides of a config, and words that the line has to have. Wrong values of a setting are in tests/test_config.py.
IN_THE_CONFIG: list[tuple[str, list[str]]] = [
    # the fields
    ("use_maximum_batch_size=yes-please", ["use_maximum_batch_size='yes-please'", "must be True or False"]),
    ("batch_increase_fn=a.b", ["batch_increase_fn", "did you mean 'batch_increase_function'"]),
    ("adaptive_batchin.search=predict", ["adaptive_batchin", "did you mean 'adaptive_batching'"]),
    (f"micro_batch_size=3 batch_size=8 use_maximum_batch_size=False {FUNCTION}=null",
     ["micro_batch_size=3", "batch_size=8", "[1, 2, 4, 8]"]),
    ("enable_async_checkpointing=True micro_batch_size=2", ["enable_async_checkpointing=True: asynch"]),
    ("--micro_batch_size auto", ["write micro_batch_size=auto"]),
    ("batch_size=auto", ["batch_size='auto'", "whole number"]),
    (f"{OURS}.search=fastest", ["search='fastest'", "binary_search, power_of_two, predict"]),
    (f"{OURS}=[]", ["adaptive_batching=[]", "cannot be read", "key=value"]),
    (f"{OURS}.micro_batch_size=auto", ["belongs at the top level: write micro_batch_size=auto"]),
    (f"{OURS}.memory_limit=4KB", ["adaptive_batching.memory_limit='4KB' is 4000 bytes", "write how much it may use"]),
    (f"{OURS}.headroom=0.6", ["adaptive_batching.headroom=0.6 keeps 60 %", "write adaptive_batching.memory_limit=40%"]),
    ("--micro_batch_size auto", ["write micro_batch_size=auto"]),
    ("batch_size=auto", ["batch_size='auto' must be", "micro_batch_size=auto", "use_maximum_batch_size=True"]),
    ("max_batch_size=16", ["max_batch_size=16", "write adaptive_batching.max_batch_size=16"]),
    ("memory_limit=8GiB", ["memory_limit='8GiB'", "write adaptive_batching.memory_limit=8GiB"]),
    # validation
    ("run_val_every_n_steps=5", ["run_val_every_n_steps=5", "set dataset_val", "run_val_every_n_steps=null"]),
    (f"{VAL} run_val_every_n_steps=0", ["run_val_every_n_steps=0", "at least 1"]),
    (f"{VAL} run_val_every_n_steps=-2", ["run_val_every_n_steps=-2", "at least 1"]),
    (f"{VAL} run_val_every_n_steps=epoch", ["run_val_every_n_steps='epoch'", "whole number"]),
    (f"{VAL} run_val_every_n_steps=5 batch_size_val=0", ["batch_size_val=0", "at least 1"]),
    ("dataset_val=my_data run_val_every_n_steps=5", ["dataset_val='my_data'", "dataset_val._component_"]),
    (f"{VAL} run_val_every_n_step=5", ["run_val_every_n_step", "did you mean 'run_val_every_n_steps'"]),
    (f"{PLATEAU} {FUNCTION}.metric=val_loss", ["on_plateau", "metric='val_loss'", "set dataset_val"]),
    (f"{PLATEAU} {FUNCTION}.metric=accuracy", ["on_plateau", "metric='accuracy'", "loss or val_loss"]),
    # together
    (f"use_maximum_batch_size=True {OURS}.keep_global_batch=True", ["gradient_accumulation_steps=1", "raise"]),
    (f"{OURS}.keep_global_batch=True {OURS}.grow_beyond_memory=True", ["keep_global_batch=True", "one of them"]),
    ("collate_fn=torchtune.data.left_pad_sequence", ["left_pad_sequence", "padded_collate_sft"]),
    # increase functions
    (f"{FUNCTION}=no.such.function", ["no.such.function", "cannot be imported", "dotted path"]),
    (f"{FUNCTION}=add_eight", ["add_eight", "cannot be imported", "dotted path"]),
    (f"{FUNCTION}=math.pi", ["math.pi", "not callable", "name a function"]),
    (f"{FUNCTION}={HERE}.one_argument",
     [f"{HERE}.one_argument", "no argument 'every'", "take it out", "~batch_increase_function.every"]),
    (f"{FUNCTION}={HERE}.takes_start", [f"{HERE}.takes_start", "no argument 'every'", "but: start"]),
    (f"{FUNCTION}=growth.stp", ["'growth.stp' cannot be imported", "did you mean 'adaptive_batching.growth.step'"]),
    (f"{FUNCTION}.evry=2", ["adaptive_batching.growth.step", "no argument 'evry'", "did you mean 'every'"]),
    (f"{FUNCTION}.every=0", ["adaptive_batching.growth.step", "every"]),
    (f"{FUNCTION}.gamma=1", ["adaptive_batching.growth.step", "gamma"]),
    # what stock reads
    ("dtype=fp17", ["dtype='fp17' must be one of", "bf16"]),
    ("dtype=fp16", ["torchtune refuses this config", "use bf16 or fp32"]),
    ("device=gpu", ["device='gpu' must be a device"]),
    ("epochs=two", ["epochs='two' must be a whole number"]),
    ("gradient_accumulation_steps=0", ["gradient_accumulation_steps=0 must be", "at least 1"]),
    ("optimizer.lr=fast", ["optimizer.lr='fast' must be a number"]),
    ("optimizer.lrr=1", ["optimizer", "unexpected keyword argument 'lrr'"]),
    ("optimizer=torch.optim.Adm", ["optimizer=torch.optim.Adm", "Adm does not exist; did you mean torch.optim.Adam?"]),
    ("model.num_layerss=4", ["model: llama2 got an unexpected keyword argument 'num_layerss'"]),
    ("model=null", ["model=null names no component"]),
    # the command line itself
    ("use_maximum_batch_size", ["key=value", "use_maximum_batch_size"]),
    ("--use_maximum_batch_size=True", ["no dashes", "write use_maximum_batch_size=True"]),
]  # fmt: skip

# What only `validate` refuses: a run takes a key that it does not know for one of a script's own.
OF_VALIDATE: list[tuple[str, list[str]]] = [
    ("use_maximum_batch_siz=True", ["use_maximum_batch_siz is unknown", "did you mean 'use_maximum_batch_size'"]),
    ("gradient_acumulation_steps=2", ["gradient_acumulation_steps", "did you mean 'gradient_accumulation_steps'"]),
    ("epoch=2", ["epoch is unknown", "did you mean 'epochs'"]),
    (f"{OURS}.serach=foo", ["adaptive_batching.serach is unknown", "did you mean 'search'"]),
    (f"{OURS}.memory_limit=lots", ["adaptive_batching.memory_limit='lots'"]),
    ("loss.ignore=1", ["unexpected keyword argument 'ignore'"]),
]


ALL = [
    *MISTAKES,
    *(
        (f"validate {QUICKSTART} {overrides}", words)
        for overrides, words in [*IN_THE_CONFIG, *OF_VALIDATE]
        if "can be read" not in words and not overrides.startswith("--")
    ),
]


@pytest.mark.parametrize(("command", "words"), ALL, ids=[command for command, _ in ALL])
def test_a_mistaken_command_ends_in_one_line_and_with_2(
    command: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    assert in_this_process(*shlex.split(command)) == 2
    printed, shown = capfd.readouterr()
    assert command.split()[0] != "plan" or not printed
    check(shown.removesuffix("\n"), words)


# Command -> what is on its line besides
COMPLETE = {
    "run": f"lora_finetune_single_device --config {LORA}", "run --settings auto": "-- python x",
    "probe": f"full_finetune_single_device --config {QUICKSTART}", "validate": QUICKSTART, "plan": f"{LORA} --gpu 4090",
    "dry-run": "--gpu 4090 -- python x", "padding": "data.json", "quickstart": "", "report": "", "env": "",
}  # fmt: skip


@pytest.mark.parametrize("command", COMPLETE)
def test_an_option_that_a_command_lacks_is_named_in_one_line_that_says_where_help_is(
    command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    name = command.split()[0]
    assert in_this_process(*shlex.split(f"{command} --no-such-option {COMPLETE[command]}")) == 2
    printed, shown = capfd.readouterr()
    assert not printed and shown.endswith("\n")
    check(shown[:-1], ["--no-such-option", f"ee 'adaptive-batching {name} --help'"])


def test_no_command_is_without_a_test_of_its_options() -> None:
    assert {command.split()[0] for command in COMPLETE} == {*COMMANDS}


SEVERAL = ["--nproc_per_node", "2"]


@pytest.mark.parametrize(
    ("arguments", "said", "seen_in"),
    [
        (["--no-such-option"], "unrecognized arguments: --no-such-option;", ""),
        (["plann"], "there is no command 'plann'; did you mean 'plan'?", ""),
        (["env", "a\nb"], "unrecognized arguments: a b;", " env"),
        (["plan", "--gpus"], "argument --gpus/--devices/--nproc_per_node: expected one argument;", " plan"),
        (["plan", "--gpus", "two"], "argument --gpus/--devices/--nproc_per_node: invalid int value: 'two';", " plan"),
        (
            ["run", *SEVERAL, "full_finetune_single_device", "--config", QUICKSTART],
            "Recipe full_finetune_single_device does not support distributed training.Please run without torchrun "
            "commands;",
            " run",
        ),
    ],
)
def test_what_argparse_or_torchtune_refuses_is_one_line_that_says_where_help_is(
    arguments: list[str], said: str, seen_in: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert in_this_process(*arguments) == 2
    see = "See" if said.endswith("?") else "see"
    assert capfd.readouterr() == ("", f"error: {said} {see} 'adaptive-batching{seen_in} --help'\n")


@pytest.mark.parametrize("arguments", [[], ["--config"], ["batch_size=2"]])
def test_the_file_of_a_recipe_says_that_its_config_is_missing(arguments: list[str]) -> None:
    with mock.patch.object(sys, "argv", ["full.py", *arguments]), pytest.raises(SystemExit) as end:
        full.recipe_main()
    assert end.value.code == 2
    check(str(end.value), ["--config <path> is missing"])


FOR_BOTH = [f"{OURS}=[]", "max_batch_size=16", f"{OURS}.search=fastest"]


def end_of(recipe: str, overrides: str, tmp_path: Path) -> str:
    """Return what a command with these mistakes ends with; it does so before the model or the data are touched."""
    module, name = {"full": full, "lora": lora, "lora_dpo": lora_dpo}[recipe], RECIPES[recipe][0]
    path = str(CONFIGS / f"{recipe}_single_device.yaml")
    arguments = ["run", "--config", path, f"output_dir={tmp_path}/out", *overrides.split()]
    stock = mock.patch.object(load_stock(name).config, "instantiate", side_effect=AssertionError("something was made"))
    with mock.patch.object(sys, "argv", arguments), stock, pytest.raises(SystemExit) as end:
        module.recipe_main()
    return str(end.value)


def check(line: str, words: list[str]) -> None:
    assert line.startswith("error: ") and "\n" not in line
    assert [word for word in words if word not in line] == [], line


@pytest.mark.parametrize(("overrides", "words"), IN_THE_CONFIG, ids=[overrides for overrides, _ in IN_THE_CONFIG])
def test_a_run_with_a_mistake_ends_in_one_line(
    overrides: str, words: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for recipe in ("full", "lora") if overrides in FOR_BOTH else ("full",):
        check(end_of(recipe, overrides, tmp_path), words)
        assert "Traceback" not in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_gpu_that_is_not_there_is_named_with_what_trains_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    line = end_of("lora", "device=cuda dtype=bf16", tmp_path)
    check(line, ["device=cuda: no GPU is found here", "add device=cpu dtype=fp32", "'adaptive-batching plan'"])


@pytest.mark.slow  # a minute and a half
@pytest.mark.parametrize("name", sorted(name for name in config_files() if "vision" not in name))
def test_every_config_that_is_listed_is_valid(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert in_this_process("validate", name) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "overrides", "words"),
    [
        ("lora_dpo", f"{VAL} run_val_every_n_steps=5", ["run_val_every_n_steps=5 cannot be used with",
         "LoRADPORecipeSingleDevice", "set run_val_every_n_steps=null"]),
        ("full", "~optimizer_in_bwd", ["the config lacks", "Missing key optimizer_in_bwd", "to another recipe"]),
        ("full", "~batch_size", ["the config lacks a key", "Missing key batch_size"]),
        ("lora", "~dtype", ["the config lacks a key", "Missing key dtype"]),
    ],
)  # fmt: skip
def test_a_mistake_in_a_config_of_a_recipe_ends_in_one_line(
    recipe: str, overrides: str, words: list[str], tmp_path: Path
) -> None:
    check(end_of(recipe, overrides, tmp_path), words)


def test_a_config_is_validated_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("quickstart/lora_single_device", "llama3_2/1B_lora_single_device"):
        assert in_this_process("validate", name) == 0
    assert capsys.readouterr().out.count("Config is well-formed!") == 2


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("checkpointer.checkpoint_dir=/no/model", ["the model cannot be loaded", "/no/model", "top of a config"]),
        ("checkpointer.checkpoint_files=[no.bin]", ["the model cannot be loaded", "no.bin", "checkpointer.checkpoint"]),
        ("tokenizer.path=/no/tokenizer", ["tokenizer.path='/no/tokenizer' is not there"]),
        ("model.num_layers=5", ["the checkpoint is not of this model", "Missing key", "check model and checkpointer"]),
        ("dataset.split=train[:0]", ["dataset cannot be loaded", "train[:0]", "dataset.source, its split"]),
        ("dataset.data_files=/no/such/file.json", ["dataset cannot be loaded", "/no/such/file.json"]),
        ("adaptive_batching.report_dir=/dev/null use_maximum_batch_size=True", ["report_dir='/dev/null'", "set it to"]),
        ("dataset.split=train[:7] gradient_accumulation_steps=2", ["at most 7"]),
        ("use_maximum_batch_size=True adaptive_batching.memory_limit=8GiB adaptive_batching.sequence_length=32 "
         "dataset.packed=True", ["cannot be used with packed data"]),
        (f"{FUNCTION}._component_={HERE}.factory adaptive_batching.max_batch_size=16",
         ["factory(epoch=1, current_batch_size=4) returned 'two'; it must return"]),
    ],
)  # fmt: skip
def test_a_mistake_that_set_up_meets_ends_in_one_line(
    overrides: str, words: list[str], tune_run: TuneRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        tune_run("full", *RECOVER, *overrides.split())  # else stock's own set-up meets it
    check(str(end.value), words)
    assert "Traceback" not in capfd.readouterr().err
    assert not list((tmp_path / "out").glob("epoch_*"))


def test_a_function_that_fails_while_training_keeps_the_last_checkpoint_and_leaves_a_page(
    tune_run: TuneRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conftest, "makes_pages", True)
    function = [f"{FUNCTION}._component_={HERE}.factory", f"{FUNCTION}.reads_state=True"]
    with pytest.raises(SystemExit, match=r"factory\(epoch=1, current_batch_size=4\) returned 'two'; it must return"):
        tune_run("full", *function, "adaptive_batching.max_batch_size=16")
    assert (tmp_path / "out" / "epoch_0" / "model-00001-of-00001.safetensors").exists()
    assert (tmp_path / "out" / "recipe_state" / "recipe_state.pt").exists()
    words = read_page(tmp_path / "out" / "adaptive_batching" / "report.html").words["error"]
    assert "IncreaseFunctionError, 20" in words and "factory(epoch=1, current_batch_size=4) returned 'two'" in words


def test_where_the_users_code_raises_its_frames_are_shown_and_no_others(
    tune_run: TuneRun, capfd: pytest.CaptureFixture[str]
) -> None:
    function = {FUNCTION: f"{HERE}.fails_at_once"}
    with pytest.raises(SystemExit, match=r"^error: .*fails_at_once\(epoch=0, .*raised RuntimeError: not today"):
        tune_run("full", "adaptive_batching.max_batch_size=8", replaced=function)
    shown = capfd.readouterr().err
    assert 'raise RuntimeError("not today")' in shown and "RuntimeError: not today" in shown
    assert "adaptive_batching/" not in shown.split("File")[-1] and shown.count("File ") == 1, shown
    with pytest.raises(SystemExit, match=r"returned 2\.0; it must return how many samples to add"):
        tune_run("full", "adaptive_batching.max_batch_size=8", replaced={FUNCTION: f"{HERE}.returns_a_float"})
    assert "File " not in capfd.readouterr().err


@pytest.mark.slow  # the tests below have what it is made of
def test_on_several_devices_a_mistake_is_one_line_without_a_traceback(tmp_path: Path) -> None:
    command = f"run --nproc_per_node 2 full_finetune_distributed --config {QUICKSTART} data_dir=nowhere"
    program = [sys.executable, "-m", "adaptive_batching", *command.split(), "adaptive_batching.search=fastest"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line == "error: adaptive_batching.search='fastest' is unknown; known: binary_search, power_of_two, predict"


@pytest.mark.parametrize(
    ("exit_code", "line"),
    [
        (3, ""),
        (-9, "error: rank 1 was ended by SIGKILL; if that is SIGKILL, the host may"),
        (2, "error: no batch_size"),
    ],
)
def test_a_launch_ends_as_the_process_that_ended_first_and_prints_the_line_that_it_has_left(
    exit_code: int, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failure_of(rank: int, error: Exception | None) -> ProcessFailure:
        file = tmp_path / f"{rank}.json"
        with monkeypatch.context() as patch, contextlib.suppress(SystemExit):
            patch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
            with mistakes_in_one_line("anywhere"):
                raise error or SystemExit
        return ProcessFailure(local_rank=rank, pid=7, exitcode=exit_code, error_file=str(file))

    lost = RuntimeError("[gloo/transport] Connection closed by peer")
    failures = {0: failure_of(0, lost), 1: failure_of(1, ConfigError("no batch_size") if exit_code == 2 else None)}
    assert capsys.readouterr().err == "", "its launcher says it"

    def fail(*_: Any) -> None:
        assert not logging.getLogger(error_handler.__name__).isEnabledFor(logging.ERROR), "it tells of the error's file"
        raise ChildFailedError("recipe.py", failures)

    monkeypatch.setattr(Run, "_run_cmd", fail)
    monkeypatch.setattr(sys, "argv", ["adaptive-batching", "run", "full_finetune_distributed", "--config", QUICKSTART])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == (exit_code if exit_code > 0 else 1)
    assert capsys.readouterr().err.startswith(line) if line else capsys.readouterr().err == ""


def test_memory_that_runs_out_before_training_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIGS / "full_single_device.yaml"
    monkeypatch.setattr(sys, "argv", ["run", "--config", str(config), f"output_dir={tmp_path}"])
    no_memory = mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory. Tried"))
    monkeypatch.setattr(load_stock("full_finetune_single_device").config, "instantiate", no_memory)
    with pytest.raises(SystemExit) as end:
        full.recipe_main()
    told = str(end.value)
    assert told.startswith("error: out of memory before training, where the model and its data are set up (CUDA out of")
    assert "LoRA" in told and "checkpoints" not in told and "forward" not in told and "\n" not in told


def test_the_summary_that_torchrun_prints_ends_in_the_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    with pytest.raises(SystemExit), mistakes_in_one_line("anywhere"):
        raise ConfigError("search='fastest' is unknown")
    failure = ProcessFailure(local_rank=0, pid=7, exitcode=1, error_file=str(file))
    shown = str(ChildFailedError("recipe.py", {0: failure}))
    assert shown.splitlines()[-2].endswith(": error: search='fastest' is unknown") and "To enable" not in shown
