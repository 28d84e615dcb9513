"""Plans: the largest batch is the largest that trains on that device, in every recipe, on one and more devices."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from adaptive_batching._probe.search import WORTH
from tests.conftest import ROOT
from tests.emulated.test_dry_run import dry_run, start
from tests.integration.two_ranks import OTHERS

MEMORY = "1536MiB"
STEPS = 4
SMALL = [
    "device=cuda", "dtype=bf16", "adaptive_batching.memory_limit=null", "adaptive_batching.headroom=0",
    "batch_increase_function=null", "use_maximum_batch_size=False", "batch_size=1", "data_dir=nowhere",
]  # fmt: skip


def plan(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Return the exit code of a plan, and what it prints on each stream."""
    process = start([*arguments], folder, command="plan")
    printed, said = process.communicate(timeout=600)
    assert [path.name for path in folder.iterdir() if path.name.startswith("plan-")] == [], "left behind"
    return process.returncode, printed, said


def planned(folder: Path, *arguments: str) -> dict[str, Any]:
    code, printed, said = plan(folder, "--json", *arguments)
    found: dict[str, Any] = json.loads(printed or said)
    assert code == {"fits": 0, "does not fit": 1, "tight": 3, "cannot tell": 4}[found["answer"]]
    return found


def trains(run: dict[str, Any]) -> bool:
    """Return True if a dry run went on at its size: without an error, and without a retry in each later step."""
    return run["fits"] is True and run["retries"] < run["steps"] - 1 and not run["out_of_memory_survived"]


@dataclass(frozen=True)
class Row:
    recipe: str
    config: str
    overrides: tuple[str, ...] = ()
    length: int = 256
    devices: int = 1
    memory: str = MEMORY
    mark: str = "slow"

    def __str__(self) -> str:
        return "-".join([self.recipe, Path(self.config).name, *(each.split("=")[0] for each in self.overrides[:2])])


FULL, LORA = "quickstart/full_single_device", "quickstart/lora_single_device"
CHECKPOINTED = ("enable_activation_checkpointing=True", "gradient_accumulation_steps=4")
OF = {kind: tuple(overrides) for kind, (_, _, overrides) in OTHERS.items()}
IN_BACKWARD = ("optimizer_in_bwd=True", "clip_grad_norm=null")
OF_1B: Any = {"length": 512, "memory": "8GiB"}
ROWS = [
    Row("full_finetune_single_device", FULL, mark=""),
    Row("full_finetune_distributed", FULL, devices=2, mark="wide"),
    Row("lora_finetune_single_device", LORA, CHECKPOINTED),
    Row("full_finetune_single_device", FULL, IN_BACKWARD),
    Row("full_finetune_single_device", FULL, ("gradient_accumulation_steps=3",)),
    Row("lora_finetune_distributed", LORA, devices=2),
    Row("full_finetune_distributed", FULL, devices=4),
    Row("lora_dpo_single_device", "quickstart/lora_dpo_single_device"),
    Row("lora_dpo_distributed", "quickstart/lora_dpo_single_device", devices=2),
    Row("full_dpo_distributed", "quickstart/lora_dpo_single_device", OF["full_dpo"], devices=2),
    Row("knowledge_distillation_single_device", LORA, OF["kd"]),
    Row("knowledge_distillation_distributed", LORA, OF["kd"], devices=2),
    Row("qat_distributed", FULL, OF["qat"], devices=2),
    Row("qat_lora_finetune_distributed", LORA, OF["qat_lora"], devices=2),
    Row("lora_finetune_single_device", "llama3_2/1B_lora_single_device", ("batch_size=1",), **OF_1B),
    Row("lora_finetune_distributed", "llama3_2/1B_lora", ("batch_size=1",), devices=2, **OF_1B),
]  # fmt: skip


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=f"{row}-{row.devices}", marks=getattr(pytest.mark, row.mark) if row.mark else [])
        for row in ROWS
    ],
)
def test_the_largest_batch_of_a_plan_is_the_largest_that_trains_there(
    row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With segments that expand, so that what a set-up has left in pieces does not decide it."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    of_run = [row.recipe, "--config", row.config, *(SMALL if "quickstart" in row.config else []), *row.overrides]
    options = ["--memory", row.memory, "--sequence-length", str(row.length)]
    found = planned(tmp_path, *of_run, *options, "--gpus", str(row.devices))
    largest = found["largest_micro_batch"]
    assert found["fits"] is True and largest > 2 and found["bound"] == "memory", found

    real = [*options, "--devices", str(row.devices), "--steps", str(STEPS), *of_run]
    more = int(largest * (1 + WORTH)) + 1  # a smaller gain is not worth a step of the probe
    probed = ["use_maximum_batch_size=True", f"adaptive_batching.max_batch_size={more}"]
    rounds = "adaptive_batching.round_to_power_of_two=False"
    run, _ = dry_run(tmp_path, *real, *probed, rounds)  # on as many real ranks
    assert run["largest_input"]["size"][0] in (largest, 2 * largest), "with both answers of a pair in one forward pass"
    assert trains(run)
    unprobed = [f"batch_size={more}", f"micro_batch_size={more}", "adaptive_batching.audit_every=1000"]
    run, _ = dry_run(tmp_path, *real, *unprobed)
    assert not trains(run)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A plan of data that bound it."""
    bound = ["--samples", "100", "--price", "2", "--sequence-length", "96", "--gpu", "T4"]
    return planned(tmp_path_factory.mktemp("plan"), FULL, *SMALL, "batch_size=40", *bound)


def test_one_object_in_json(whole: dict[str, Any]) -> None:
    documented = (ROOT / "docs" / "reference.md").read_text().split("- A plan:")[1]
    assert {*whole} == {*re.findall("`([a-z_]+)`", documented)}
    assert whole["version"] == 2 and whole["card"] == "T4" and whole["devices"] == 1
    assert whole["token_budget"] == whole["largest_micro_batch"] * 96
    assert 0 < whole["peak_bytes"] <= whole["reserved_bytes"] < whole["memory_bytes"]
    assert whole["peak"]["categories"]["weights"] > 0 and whole["peak"]["categories"]["optimizer states"] > 0
    time = whole["time"]
    assert time["hours_per_epoch"] == pytest.approx(100 * 96 / time["tokens_per_second"] / 3600)
    assert time["cost"] == pytest.approx(2 * time["hours"])


def test_a_small_model_is_bound_by_its_data(whole: dict[str, Any]) -> None:
    assert (whole["largest_micro_batch"], whole["bound"], whole["answer"]) == (100, "100 samples of data", "fits")


@pytest.mark.slow
def test_each_lever_is_planned_by_itself_with_what_to_paste(tmp_path: Path) -> None:
    asked = [FULL, *SMALL, "--samples", "100", "--sequence-length", "96", "--gpu", "T4", "--levers"]
    pulled = planned(tmp_path, *asked)["levers"]
    found = {lever["name"]: lever for lever in pulled}
    assert {"activation checkpointing", "compile", "optimizer in the backward pass", "fused optimizer"} <= {*found}
    checkpointing = found["activation checkpointing"]
    assert checkpointing["paste"] == "enable_activation_checkpointing=True"
    assert checkpointing["largest_micro_batch"] == 100 and checkpointing["tokens_per_second"] > 0
    budgets = [lever["token_budget"] or 0 for lever in pulled]
    assert budgets == sorted(budgets, reverse=True)


def test_what_does_not_fit_is_said_with_what_holds_the_memory(tmp_path: Path) -> None:
    asked = [FULL, *SMALL, "--memory", "540MiB", "--sequence-length", "512"]
    code, out, _ = plan(tmp_path, *asked)
    assert code == 1 and out.startswith(
        "does not fit: a forward pass of 1 x 512 tokens on card (540 MiB): a batch of one"
    )
    assert "held by" in out and "--levers tries what takes less" in out


@pytest.mark.wide
def test_a_batch_above_the_largest_does_not_fit_and_without_a_length_the_data_are_asked_for(tmp_path: Path) -> None:
    above = planned(tmp_path, FULL, *SMALL, "batch_size=400", "--memory", MEMORY, "--sequence-length", "256")
    assert above["answer"] == "does not fit" and 1 < above["largest_micro_batch"] < 400
    code, out, said = plan(tmp_path, FULL, *SMALL, "tokenizer.max_seq_len=null", "--memory", MEMORY)
    assert code == 2 and not out and said.count("\n") == 1 and "give --sequence-length" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sequence-length", "513"], "513 tokens, but the model takes at most 512; set tokenizer.max_seq_len"),
        (["model.num_heads=5"], "torchtune refuses this config"),
        (["optimizer._component_=torch.optim.Nadam"], "Nadam"),
        (["optimizer_in_bwd=True"], "clip_grad_norm"),
        (["dtype=fp17"], "dtype='fp17' must be one of"),
        (["model._component_=torchtune.models.llama3_2.lora_llama3_2_2b"], "2b does not exist; did you mean"),
    ],
)
def test_what_the_recipe_refuses_is_said_in_one_line(arguments: list[str], words: str, tmp_path: Path) -> None:
    length = [] if "--sequence-length" in arguments else ["--sequence-length", "64"]
    code, out, said = plan(tmp_path, FULL, *SMALL, "--memory", MEMORY, *arguments, *length)
    assert code == 2 and not out and said.startswith("error: ") and said.count("\n") == 1 and words in said
