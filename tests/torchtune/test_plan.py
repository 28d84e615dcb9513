"""The command line of plans: what is planned, what would help, and mistakes in one line. Plans: tests/emulated."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from adaptive_batching.__main__ import main
from adaptive_batching._torchtune.cli import plan as plan_command
from adaptive_batching._torchtune.cli.levers import Planned, levers
from adaptive_batching._torchtune.cli.one_plan import NotPlannedError
from tests.conftest import QUICKSTART

CONFIG = str(QUICKSTART / "full_single_device.yaml")
ON_A_CARD = ["--memory", "24GiB"]


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """``plan(*arguments)``: the exit code, and what was printed on each stream."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["adaptive-batching", "plan", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        assert isinstance(end.value.code, int)
        return end.value.code, out, err

    return run


def named(*arguments: str) -> Planned:
    """Return the run that a command line names."""
    parser = argparse.ArgumentParser()
    plan_command.add_plan(parser.add_subparsers(), "adaptive-batching")
    args, rest = parser.parse_known_args(["plan", *arguments, *ON_A_CARD])
    args.overrides += rest  # as the command line does
    return plan_command._named(args)


FEWER = ("shorter samples", "more devices")
LEVERS = {
    "llama3_2/1B_full_single_device": {
        "activation checkpointing", "activation checkpointing and offloading", "compile", "LoRA", "QLoRA",
        "shorter samples",
    },
    "llama3_1/8B_lora_dpo": {"activation offloading", "QLoRA", *FEWER},
    "llama3_1/8B_full_dpo": {"activation offloading", "compile", "LoRA", *FEWER},
    "llama3_2/8B_to_1B_KD_lora_single_device": {"activation checkpointing", "compile", "QLoRA", "shorter samples"},
    "llama3/8B_qat_full": {"activation offloading", "optimizer in the backward pass", "LoRA", *FEWER},
    "llama3_1/8B_qat_lora": {"activation checkpointing", "activation checkpointing and offloading", *FEWER},
}  # fmt: skip


@pytest.mark.parametrize("name", LEVERS)
def test_levers_are_those_that_the_recipe_knows_and_that_are_not_set_yet(name: str) -> None:
    run = named(name, "--sequence-length", "1024")
    found = {lever.name: lever for lever in levers(run)}
    assert set(found) == LEVERS[name]
    assert found["shorter samples" if "qat" not in name else "more devices"].config == name
    if name == "llama3_2/1B_full_single_device":
        lora, checkpointing = found["LoRA"], found["activation checkpointing"]
        instead = (
            "adaptive-batching run lora_finetune_single_device --config llama3_2/1B_lora_single_device batch_size=4"
        )
        assert lora.paste == instead and lora.recipe == "lora_finetune_single_device"
        assert checkpointing.overrides == ("enable_activation_checkpointing=True",)


def test_a_line_of_run_is_planned_as_it_stands() -> None:
    whole = named("--config", CONFIG, "seed=1", "--recipe", "full_finetune_distributed", "--gpus", "2")
    for recipe in ("full_finetune_distributed", "adaptive_batching/recipes/full_finetune_distributed.py"):
        assert named("--nproc_per_node", "2", recipe, "--config", CONFIG, "seed=1") == whole
    assert named("full_finetune_distributed", "--devices", "2", CONFIG, "seed=1") == whole, "without --config"
    assert named(CONFIG, "seed=1", "optimizer=torch.optim.SGD").cfg.optimizer._component_ == "torch.optim.SGD"


@pytest.mark.parametrize(
    ("keys", "recipe"),
    [
        ({}, "full_finetune_single_device"),
        ({"model": {"_component_": "a.b", "lora_attn_modules": []}}, "lora_finetune_single_device"),
        ({"loss": {"_component_": "torchtune.rlhf.loss.DPOLoss"}}, "full_dpo_distributed"),
        ({"teacher_model": {"_component_": "a.b"}}, "knowledge_distillation_single_device"),
        ({"quantizer": {"_component_": "a.b"}}, "qat_distributed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_recipe_of_a_config_is_the_one_it_names_or_its_keys_are_for(
    keys: dict[str, Any], recipe: str, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.yaml"
    text = OmegaConf.to_yaml(OmegaConf.merge({"model": {"_component_": "a.b"}, "loss": {"_component_": "a.b"}}, keys))
    launched = f"# tune run --nproc_per_node 4 lora_dpo_distributed --config mine\n{text}"
    for written, found in ((text, recipe), (launched, "lora_dpo_distributed")):
        mine.write_text(written)
        run = named(str(mine))
        assert run.recipe == found and run.devices == (4 if written is launched else 2 - ("single" in recipe))


PPO = "ppo_full_finetune_single_device"


@pytest.mark.parametrize(
    ("arguments", "recipe"),
    [
        (["--config", "mistral/7B_full_ppo_low_memory"], PPO),
        ([PPO, "--config", CONFIG], PPO),
    ],
)
def test_what_is_not_covered_is_named(plan: Any, arguments: list[str], recipe: str) -> None:
    code, out, _ = plan(*arguments, *ON_A_CARD)
    assert code == 4
    assert out.startswith("cannot tell: ") and f" of {recipe}; plan supports" in out
    assert json.loads(plan(*arguments, *ON_A_CARD, "--json")[1])["fits"] is None
    with pytest.raises(NotPlannedError):
        named(*arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name a config"),
        (["llama3_2/1B_lora_single_devise"], "did you mean 'llama3_2/1B_lora_single_device'?"),
        (["lora_finetune_single_devise", CONFIG], "there is no recipe 'lora_finetune_single_devise'; did you mean"),
        ([CONFIG, "batch_size"], "'batch_size' is not an override; write key=value"),
        ([CONFIG, "model=[1,2"], "cannot be read"),
        ([CONFIG, "--sequence-length", "0"], "--sequence-length 0 must be at least 1"),
        (["llama3_1/8B_qat_lora", "--gpus", "1"], "--gpus 1: torchtune has no qat_lora_finetune_single_device"),
    ],
)
def test_a_mistake_ends_in_one_line(plan: Any, arguments: list[str], words: str) -> None:
    code, out, err = plan(*arguments, *ON_A_CARD)
    assert code == 2 and not out and err.startswith("error: ") and words in err and err.count("\n") == 1


def test_an_unknown_gpu_is_named_with_the_closest(plan: Any) -> None:
    code, _, err = plan(CONFIG, "--gpu", "RTX 4091")
    assert code == 2 and "RTX 4090" in err


@pytest.mark.skipif(torch.version.cuda is not None, reason="of a CPU build")
def test_without_a_cuda_build_of_torch_one_line_says_what_to_install(plan: Any) -> None:
    code, out, err = plan(CONFIG, *ON_A_CARD)
    assert code == 2 and not out and err.count("\n") == 1
    assert "needs a CUDA build of torch" in err and "install one in another environment" in err
