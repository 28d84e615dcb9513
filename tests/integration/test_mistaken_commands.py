"""Mistakes on the command line: every command names what is wrong and what to do in its last line, and ends with 2."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torchtune._cli.run import Run

from adaptive_batching import ConfigError
from adaptive_batching.__main__ import main
from adaptive_batching._torchtune.cli.launch import mistakes_in_one_line
from adaptive_batching.torchtune import load_stock
from recipes import full_finetune_single_device
from tests.conftest import ROOT
from tests.support.command_line import in_this_process

LORA = "llama3_2/1B_lora_single_device"
QUICKSTART = "quickstart/full_single_device"
PLAN = f"plan {LORA}"

# Files that are there, in the working directory.
FILES: dict[str, bytes] = {
    "list.yaml": b"- 1\n- 2\n",
    "broken.yaml": b"a: [1,\n b: }",
    "binary.yaml": bytes(range(256)),
    "empty.yaml": b"",
    "nothing.yaml": (ROOT / "recipes/configs/quickstart/full_single_device.yaml")
    .read_bytes()
    .replace(b"${data_dir}", b"${nowhere}"),
    "no_record.jsonl": b"nothing\n",
}

# (command, words that its last line has to have)
MISTAKES: list[tuple[str, list[str]]] = [
    # names
    ("runn", ["no command 'runn'", "did you mean 'run'"]),
    ("validat", ["did you mean 'validate'"]),
    (f"run lora_finetune_single_devic --config {LORA}", ["no recipe", "did you mean 'lora_finetune_single_device'"]),
    (f"run {LORA} --config {LORA}", ["is a config, not a recipe; run it with lora_finetune_single_device"]),
    ("run lora_finetune_single_device --config llama3_2/1B_lora_single_devic", [f"did you mean '{LORA}'"]),
    ("run lora_finetune_single_device --config lora_finetune_single_device", ["is a recipe, not a config"]),
    (f"probe full_finetune_single_devic --config {QUICKSTART}", ["did you mean 'full_finetune_single_device'"]),
    (f"validate {QUICKSTART} --recipe full_finetune_single_devic", ["did you mean 'full_finetune_single_device'"]),
    ("validate lora_finetune_single_device", ["is a recipe, not a config"]),
    ("plan llama3_2/1B_lora_single_devic --gpu 4090", [f"did you mean '{LORA}'"]),
    (f"plan lora_finetune_single_devic --config {LORA}", ["no recipe", "did you mean 'lora_finetune_single_device'"]),
    (f"{PLAN} --gpu 4091", ["--gpu '4091' is unknown", "RTX 4090", "--memory 24GiB"]),
    (f"{PLAN} --gpu ''", ["--gpu ''", "known: ", "RTX 4090"]),
    ("ls --recipe lora_finetune_single_devic", ["did you mean 'lora_finetune_single_device'"]),
    ("cat llama3_2/1B_lora_single_devic", [f"did you mean '{LORA}'"]),
    ("cat lora_finetune_single_device", ["is a recipe, not a config"]),
    ("cp llama3_2/1B_lora_single_devic .", [f"did you mean '{LORA}'"]),
    # what is missing, and what is too much
    ("run", ["required: recipe"]),
    ("run lora_finetune_single_device", ["--config <name or path> is missing"]),
    ("run lora_finetune_single_device --config", ["--config <name or path> is missing"]),
    (f"run lora_finetune_single_device --confg {LORA}", ["--config <name or path> is missing"]),
    ("run -q -v lora_finetune_single_device --config x", ["-v: not allowed with argument -q"]),
    ("probe full_finetune_single_device", ["--config <name or path> is missing"]),
    ("validate", ["required: config"]),
    ("plan", ["name a config", "'ls' lists them", "--gpu 4090"]),
    ("cat", ["required: config"]),
    ("download", ["required: repo_id"]),
    ("ls --jsn", ["unrecognized arguments: --jsn"]),
    ("env all", ["unrecognized arguments: all"]),
    (f"{PLAN} --memry 24", ["unrecognized arguments: --memry"]),
    ("quickstart --data-dir x", ["unrecognized arguments: --data-dir"]),
    # values
    (f"{PLAN} --memory lots", ["--memory lots", "write 24, 24GiB or bytes"]),
    (f"{PLAN} --memory 0", ["--memory 0", "write 24, 24GiB or bytes"]),
    (f"{PLAN} --memory 90%", ["--memory 90%", "write 24, 24GiB or bytes"]),
    (f"{PLAN} --memory 24 --gpu 4090", ["--gpu: not allowed with argument --memory"]),
    (f"{PLAN} --sequence-length long", ["--sequence-length", "'long'"]),
    (f"{PLAN} --sequence-length 0", ["--sequence-length 0 must be at least 1"]),
    (f"{PLAN} --devices 0", ["--devices 0 must be at least 1"]),
    (f"{PLAN} --mfu 40 --gpu 4090", ["--mfu 40.0", "at most 1"]),
    (f"{PLAN} --memory 24 dtype=fp17", ["dtype='fp17' must be one of", "bf16"]),
    (f"{PLAN} --memory 24 batch_size", ["'batch_size' is not an override", "key=value"]),
    (f"run --nproc_per_node 0 full_finetune_distributed --config {QUICKSTART}", ["--nproc_per_node 0", "at least 1"]),
    (f"run --nproc_per_node two full_finetune_distributed --config {QUICKSTART}", ["--nproc_per_node two"]),
    (f"run --nproc_per_node 2 full_finetune_single_device --config {QUICKSTART}", ["does not support distributed"]),
    (f"validate {QUICKSTART} batch_size", ["batch_size cannot be read", "key=value"]),
    (f"validate {QUICKSTART} ~no_such_key", ["~no_such_key cannot be read", "no_such_key"]),
    # what only stock reads
    (f"validate {QUICKSTART} ~resume_from_checkpoint", ["lacks resume_from_checkpoint, which full_finetune_single"]),
    (f"validate {QUICKSTART} ~compile ~seed", ["lacks seed, compile"]),
    (f"validate {QUICKSTART} --recipe ppo_full_finetune_single_device", ["lacks ref_policy_checkpointer, value_"]),
    (f"validate {QUICKSTART} epochs=two", ["epochs='two' must be a whole number"]),
    (f"validate {QUICKSTART} gradient_accumulation_steps=0", ["gradient_accumulation_steps=0", "at least 1"]),
    (f"validate {QUICKSTART} resume_from_checkpoint=perhaps", ["resume_from_checkpoint='perhaps'", "True or False"]),
    (f"validate {QUICKSTART} device=gpu", ["device='gpu'", "cuda or cpu"]),
    (f"validate {QUICKSTART} dtype=fp16", ["torchtune refuses this config", "fp16"]),
    (f"validate {QUICKSTART} enable_activation_offloading=True", ["torchtune refuses", "when training on CUDA"]),
    (f"validate {QUICKSTART} optimizer_in_bwd=True", ["torchtune refuses this config", "clip_grad_norm=None"]),
    (f"validate {QUICKSTART} optimizer.lr=fast", ["optimizer.lr='fast' must be a number"]),
    (f"validate {QUICKSTART} optimizer.lrr=1", ["optimizer=torch.optim.AdamW", "'lrr'"]),
    (f"validate {QUICKSTART} model=null", ["model=null names no component"]),
    (f"validate {QUICKSTART} optimizer=torch.optim.Adm", ["torch.optim.Adm"]),
    # files
    ("validate missing.yaml", ["no config 'missing.yaml'"]),
    ("validate folder", ["no config 'folder'"]),
    ("validate list.yaml", ["list.yaml is not a config: it must map keys to values"]),
    ("validate broken.yaml", ["broken.yaml cannot be read", "in line 2"]),
    ("validate binary.yaml", ["binary.yaml cannot be read", "utf-8"]),
    ("validate empty.yaml", ["empty.yaml: the config lacks"]),
    ("validate nothing.yaml", ["'nowhere' not found"]),
    ("run lora_finetune_single_device --config list.yaml", ["list.yaml is not a config: it must map keys to values"]),
    ("run lora_finetune_single_device --config broken.yaml", ["broken.yaml cannot be read", "in line 2"]),
    ("run lora_finetune_single_device --config binary.yaml", ["binary.yaml cannot be read"]),
    (f"run folder --config {LORA}", ["no recipe 'folder'"]),
    ("plan list.yaml --memory 24", ["list.yaml is not a config: it must map keys to values"]),
    ("plan broken.yaml --memory 24", ["broken.yaml cannot be read", "in line 2"]),
    ("plan folder --memory 24", ["no config 'folder'"]),
    ("plan empty.yaml --memory 24", ["empty.yaml has no model"]),
    (f"{PLAN} --plot folder", ["--plot folder is not an image format", ".png"]),
    (f"{PLAN} --plot no/x.png", ["--plot no/x.png: there is no folder"]),
    ("cat binary.yaml", ["binary.yaml cannot be read"]),
    ("cat --sort broken.yaml", ["broken.yaml cannot be read", "in line 2"]),
    (f"cp {LORA} no/such/x.yaml", ["there is no folder 'no/such'", "--make-parents"]),
    ("report", ["there is no record of a run below"]),
    ("report folder", ["there is no record of a run in folder", "output_dir"]),
    ("report no_record.jsonl", ["no_record.jsonl has no events"]),
    ("quickstart --data_dir binary.yaml", ["--data_dir binary.yaml", "name another folder"]),
]


@pytest.mark.parametrize(("command", "words"), MISTAKES, ids=[command for command, _ in MISTAKES])
def test_a_mistaken_command_ends_in_one_line_and_with_2(
    command: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    assert in_this_process(*shlex.split(command)) == 2
    shown = capfd.readouterr().err
    line = shown.rstrip().splitlines()[-1]
    assert "error: " in line and [word for word in words if word not in line] == [], shown
    assert "Traceback" not in shown


@pytest.mark.slow  # the tests below have what it is made of
def test_on_several_devices_a_mistake_is_one_line_without_a_traceback(tmp_path: Path) -> None:
    command = f"run --nproc_per_node 2 full_finetune_distributed --config {QUICKSTART} data_dir=nowhere"
    program = [sys.executable, "-m", "adaptive_batching", *command.split(), "adaptive_batching.search=fastest"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line == "error: adaptive_batching.search='fastest' is unknown; known: binary_search, power_of_two, predict"


@pytest.mark.parametrize(
    ("exit_code", "ends_with"),
    [(3, None), (-9, "error: rank 1 was ended by SIGKILL; if that is SIGKILL, the host may")],
)
def test_a_launch_ends_as_the_process_that_ended_first(
    exit_code: int, ends_with: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = ProcessFailure(local_rank=1, pid=7, exitcode=exit_code, error_file="<N/A>")

    def fail(*_: Any) -> None:
        raise ChildFailedError("recipe.py", {1: failure})

    monkeypatch.setattr(Run, "_run_cmd", fail)
    monkeypatch.setattr(sys, "argv", ["adaptive-batching", "run", "full_finetune_distributed", "--config", QUICKSTART])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == exit_code if ends_with is None else str(end.value).startswith(ends_with)


@pytest.mark.parametrize(
    ("error", "local_rank", "waited"),
    [
        (ConfigError("no"), "0", 0),
        (ConfigError("no"), "1", 5),  # torchrun has ended it by then if the first has the same mistake
        (RuntimeError("[gloo/transport] Connection closed by peer"), "0", 15),  # the one that closed it knows why
        (ConfigError("no"), None, None),  # without torchrun
    ],
)
def test_of_ranks_with_the_same_mistake_the_first_tells_it(
    error: Exception, local_rank: str | None, waited: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    with pytest.raises(SystemExit, match=r"^error: "), mistakes_in_one_line("anywhere"):
        raise error
    assert waits == ([] if waited is None else [waited])


def test_the_summary_that_torchrun_prints_ends_in_the_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    with pytest.raises(SystemExit), mistakes_in_one_line("anywhere"):
        raise ConfigError("search='fastest' is unknown")
    failure = ProcessFailure(local_rank=0, pid=7, exitcode=1, error_file=str(file))
    shown = str(ChildFailedError("recipe.py", {0: failure}))
    assert shown.splitlines()[-2].endswith(": error: search='fastest' is unknown") and "To enable" not in shown


def test_memory_that_runs_out_before_training_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ROOT / "recipes" / "configs" / f"{QUICKSTART}.yaml"
    monkeypatch.setattr(sys, "argv", ["run", "--config", str(config), f"output_dir={tmp_path}"])
    no_memory = mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory. Tried"))
    monkeypatch.setattr(load_stock("full_finetune_single_device").config, "instantiate", no_memory)
    with pytest.raises(SystemExit) as end:
        full_finetune_single_device.recipe_main()
    told = str(end.value)
    assert told.startswith("error: out of memory before training, where the model and its data are set up (CUDA out of")
    assert "LoRA" in told and "checkpoints" not in told and "forward" not in told and "\n" not in told
