"""Mistaken commands, as people type them: each ends in one line with key, value and remedy, before training."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from adaptive_batching._torchtune.names import config_files
from adaptive_batching.torchtune import load_stock
from recipes import full_finetune_single_device as full
from recipes import lora_dpo_single_device as lora_dpo
from recipes import lora_finetune_single_device as lora
from tests import conftest
from tests.conftest import RECIPES, ROOT, TuneRun
from tests.support.command_line import in_this_process
from tests.support.html import read_page

CONFIGS = ROOT / "recipes" / "configs" / "quickstart"
OURS = "adaptive_batching"
FUNCTION = "batch_increase_function"
HERE = "tests.integration.test_mistakes"
VAL = "dataset_val._component_=torchtune.datasets.instruct_dataset"
PLATEAU = f"{FUNCTION}=adaptive_batching.growth.on_plateau ~{FUNCTION}.every"


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


# (overrides, words that the line has to have). Wrong values of a setting are in tests/test_config.py.
IN_THE_CONFIG: list[tuple[str, list[str]]] = [
    # the fields
    ("use_maximum_batch_size=yes-please", ["use_maximum_batch_size='yes-please'", "must be True or False"]),
    ("batch_increase_fn=a.b", ["batch_increase_fn", "did you mean 'batch_increase_function'"]),
    ("adaptive_batchin.search=predict", ["adaptive_batchin", "did you mean 'adaptive_batching'"]),
    (f"micro_batch_size=3 batch_size=8 use_maximum_batch_size=False {FUNCTION}=null",
     ["micro_batch_size=3", "batch_size=8", "[1, 2, 4, 8]"]),
    ("batch_size=auto", ["batch_size='auto'", "whole number"]),
    (f"{OURS}.search=fastest", ["search='fastest'", "binary_search, power_of_two, predict"]),
    (f"{OURS}=[]", ["adaptive_batching=[]", "cannot be read", "key=value"]),
    (f"{OURS}.micro_batch_size=auto", ["belongs at the top level: write micro_batch_size=auto"]),
    (f"{OURS}.memory_limit=4", ["adaptive_batching.memory_limit=4 is 4 bytes", "write how much it may use"]),
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
    (f"{FUNCTION}=adaptive_batching.growth.norm_test ~{FUNCTION}.every {OURS}.keep_global_batch=True "
     "gradient_accumulation_steps=2", ["norm_test", "keep_global_batch=False"]),
    (f"{FUNCTION}=adaptive_batching.growth.norm_test ~{FUNCTION}.every optimizer_in_bwd=True clip_grad_norm=null",
     ["norm_test", "set optimizer_in_bwd=False"]),
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
    ("optimizer=torch.optim.Adm", ["optimizer=torch.optim.Adm", "'Adm'"]),
    ("model.num_layerss=4", ["model: llama2 got an unexpected keyword argument 'num_layerss'"]),
    ("model=null", ["model=null names no component"]),
    # the command line itself
    ("use_maximum_batch_size", ["key=value", "use_maximum_batch_size"]),
    ("--use_maximum_batch_size=True", ["key=value", "--use_maximum_batch_size=True"]),
]  # fmt: skip


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
def test_a_mistaken_command_ends_in_one_line(
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


REFUSED_BY_VALIDATE = [
    *(mistake for mistake in IN_THE_CONFIG if "can be read" not in mistake[1] and not mistake[0].startswith("--")),
    ("use_maximum_batch_siz=True", ["use_maximum_batch_siz is unknown", "did you mean 'use_maximum_batch_size'"]),
    ("gradient_acumulation_steps=2", ["gradient_acumulation_steps", "did you mean 'gradient_accumulation_steps'"]),
    ("epoch=2", ["epoch is unknown", "did you mean 'epochs'"]),
    (f"{OURS}.serach=foo", ["adaptive_batching.serach is unknown", "did you mean 'search'"]),
    (f"{OURS}.memory_limit=lots", ["adaptive_batching.memory_limit='lots'"]),
    ("loss.ignore=1", ["unexpected keyword argument 'ignore'"]),
]


@pytest.mark.parametrize(("overrides", "words"), REFUSED_BY_VALIDATE, ids=[each for each, _ in REFUSED_BY_VALIDATE])
def test_validate_refuses_what_a_run_refuses_before_it_loads_a_model(
    overrides: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert in_this_process("validate", "quickstart/full_single_device", *overrides.split()) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "error: " in line and [word for word in words if word not in line] == [], line


@pytest.mark.slow  # a minute and a half
@pytest.mark.parametrize("name", sorted(name for name in config_files() if "vision" not in name))
def test_every_config_that_is_listed_is_valid(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert in_this_process("validate", name) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "overrides", "words"),
    [
        ("lora_dpo", f"{VAL} run_val_every_n_steps=5", ["run_val_every_n_steps=5 cannot be used with",
         "LoRADPORecipeSingleDevice", "set run_val_every_n_steps=null"]),
        ("full", "~optimizer_in_bwd", ["the config lacks", "Missing key optimizer_in_bwd", "to another recipe", "ls"]),
        ("full", "~batch_size", ["the config lacks a key", "Missing key batch_size"]),
        ("lora", "~dtype", ["the config lacks a key", "Missing key dtype"]),
    ],
)  # fmt: skip
def test_a_mistake_in_a_config_of_a_recipe_ends_in_one_line(
    recipe: str, overrides: str, words: list[str], tmp_path: Path
) -> None:
    check(end_of(recipe, overrides, tmp_path), words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ["there is no config", "did you mean 'quickstart/lora_single_device'"]),
        ("a: [1,\n b: }", ["cannot be read", "in line 2"]),
        ("- 1\n- 2", ["it must map keys to values"]),
        ("loss: {_component_: torch.nn.NoLoss}", ["NoLoss", "config.yaml"]),
        ("loss: {_component_: torch.nn.CrossEntropyLoss, ignore: 1}", ["CrossEntropyLoss", "ignore"]),
    ],
)
def test_what_cannot_be_validated_is_named_in_one_line(
    text: str | None, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    assert in_this_process("validate", str(path) if text else "quickstart/lora_single_devic") == 2
    shown = capsys.readouterr().err
    assert [word for word in words if word not in shown] == [], shown
    assert "Traceback" not in shown


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
        tune_run("full", *overrides.split())
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
