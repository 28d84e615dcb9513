"""Plans of other objectives, and of several devices: the recipe's own step, and what it really takes.

On several devices the rank's peer is a process group that is none, so that numbers are nonsense; memory is not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed._tools.common_utils import get_untyped_storages

from adaptive_batching._ranks.agree import Ranks
from adaptive_batching._ranks.fsdp import is_sharded
from adaptive_batching._torchtune.host import Host
from adaptive_batching._torchtune.losses import preferences
from adaptive_batching._torchtune.on_paper import RECIPES, Data, on_devices, set_up
from adaptive_batching._torchtune.set_up_memory import Allocations
from adaptive_batching._torchtune.training_step import training_step
from adaptive_batching._trace.trace import trace_step
from adaptive_batching._trace.training import TrainingStep, kept_tensors
from tests.integration.two_ranks import OTHERS
from tests.support.overrides import TEACHER
from tests.support.steps import most_in_use
from tests.torchtune.test_on_paper import LENGTH, assert_same, config, real_host

BATCH = 6
CHECKPOINTING = "enable_activation_checkpointing=True"
WHOLE = ["kd_loss._component_=torchtune.modules.loss.ForwardKLLoss", "loss._component_=torch.nn.CrossEntropyLoss"]
DPO, KD = ("lora_dpo_single_device", "lora_dpo"), ("knowledge_distillation_single_device", "lora")


def sharded(kind: str, *added: str) -> tuple[str, str, list[str]]:
    recipe, config, overrides = OTHERS[kind]
    return recipe, config, [*overrides, *added]


CASES: dict[str, tuple[str, str, list[str]]] = {
    "lora_dpo": (*DPO, []),
    "lora_dpo, checkpointing": (*DPO, [CHECKPOINTING, "dtype=bf16"]),
    "lora_dpo, quantized": (*DPO, ["model.quantize_base=True"]),
    "kd": (*KD, TEACHER),
    "kd, whole logits": (*KD, [*TEACHER[:-1], *WHOLE]),
    "full, sharded": ("full_finetune_distributed", "full", []),
    "lora, sharded": ("lora_finetune_distributed", "lora", []),
    **{f"{kind}, sharded": sharded(kind) for kind in OTHERS},
    "full_dpo, ends sharded": sharded("full_dpo", "custom_sharded_layers=[output]"),
    "kd, ends sharded": sharded("kd", "custom_sharded_layers=[output]"),
    "qat, checkpointing": sharded("qat", CHECKPOINTING),
}
"""Recipe, config of the quickstart, and overrides."""

SLOW = {case for case in CASES if "," in case and not case.endswith(", sharded")}


def config_of(case: str, **paths: Path) -> Any:
    _, name, added = CASES[case]
    removed = [override.removeprefix("~model.") for override in added if override.startswith("~")]
    kept = [override for override in added if not override.startswith("~")]
    cfg = config(name, "adaptive_batching.recover_from_oom=False", *kept, **paths)
    for key in removed:
        del cfg.model[key]
    return cfg


@contextlib.contextmanager
def devices_of(case: str) -> Iterator[int]:
    """As many devices as the recipe is for."""
    count = 2 if CASES[case][0].endswith("distributed") else 1
    group = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    with mock.patch.dict("os.environ", group if count > 1 else {}), on_devices(count):
        yield count


def as_one_of(host: Host) -> Host:
    """The rank without what it asks of others: agreement, and the norm of all shards."""
    return replace(host, ranks=Ranks(alone=True), clip_norm=None) if is_sharded(host.model) else host


def step_of(case: str, host: Host) -> TrainingStep:
    sample = Data(LENGTH, 50, pairs=RECIPES[CASES[case][0]] is preferences)[0]
    return training_step(as_one_of(host), sample, accumulates=False)


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum({s.data_ptr(): s.nbytes() for each in tensors for s in get_untyped_storages(each)}.values())


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.slow if case in SLOW else ()) for case in CASES])
def test_the_step_on_paper_is_that_of_the_recipe_and_takes_what_it_takes(
    case: str, inputs: Path, tmp_path: Path
) -> None:
    with devices_of(case) as count:
        allocations = Allocations()
        on_paper, _ = set_up(CASES[case][0], config_of(case), Data(LENGTH, 50), count, allocations)
        ours = trace_step(step_of(case, on_paper))
        step = step_of(case, real_host(CASES[case][0], config_of(case, inputs=inputs, out=tmp_path)))
        traced = trace_step(step)
        models = [on_paper.model, *on_paper.objective.frozen_models]
        assert all(tensor.is_meta for model in models for tensor in [*model.parameters(), *model.buffers()])
        assert_same(ours, traced)
        run = step.bind(step.model, step.optimizers)
        run(step.make_batch(BATCH))  # makes the optimizer states, and what a step keeps
        really = most_in_use(lambda: run(step.make_batch(BATCH)))
        assert trace_step(step).curve.peak_bytes(BATCH) == traced.curve.peak_bytes(BATCH), "after real steps, too"
    log = ours.at(BATCH).log
    assert max(log) - log[0] == pytest.approx(really, rel=0.01 if count == 1 else 0.02)
    assert log[0] - ours.curve.resting_bytes == bytes_of(kept_tensors(step.model)), "what a step keeps for the next"
    assert bytes_of(step.model.parameters()) <= allocations.so_far().most_bytes
