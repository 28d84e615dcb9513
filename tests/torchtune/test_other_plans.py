"""Plans of other objectives, and of several devices: the recipe's own step, and what it really takes.

On several devices the rank's peer is a process group that is none, so that numbers are nonsense; memory is not.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from omegaconf import OmegaConf
from torch.distributed._tools.common_utils import get_untyped_storages
from torchtune.config._utils import _merge_yaml_and_cli_args

from adaptive_batching._probe.trial import TrainingStep, kept_tensors
from adaptive_batching._ranks.agree import Ranks
from adaptive_batching._ranks.fsdp import is_sharded
from adaptive_batching._torchtune.host import Host
from adaptive_batching._torchtune.on_paper import RECIPES, Data, on_devices, set_up
from adaptive_batching._torchtune.preferences import preferences
from adaptive_batching._torchtune.recipe import AdaptiveBatching
from adaptive_batching._torchtune.set_up_memory import Allocations
from adaptive_batching._torchtune.stock import load_stock
from adaptive_batching._torchtune.training_step import training_step
from adaptive_batching._trace.trace import trace_step
from adaptive_batching._trace.traced_step import TracedStep
from tests.conftest import ARCHITECTURE, ROOT
from tests.integration.two_ranks import OTHERS
from tests.support.overrides import TEACHER
from tests.support.real_memory import most_in_use

LENGTH, BATCH = 48, 6
CHECKPOINTING = ("enable_activation_checkpointing=True",)
CASES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "lora_dpo": ("lora_dpo_single_device", "lora_dpo", ()),
    "lora_dpo, checkpointing": ("lora_dpo_single_device", "lora_dpo", (*CHECKPOINTING, "dtype=bf16")),
    "lora_dpo, quantized": ("lora_dpo_single_device", "lora_dpo", ("model.quantize_base=True",)),
    "kd": ("knowledge_distillation_single_device", "lora", (*TEACHER,)),
    "kd, whole logits": (
        "knowledge_distillation_single_device",
        "lora",
        (
            *TEACHER[:-1],
            "kd_loss._component_=torchtune.modules.loss.ForwardKLLoss",
            "loss._component_=torch.nn.CrossEntropyLoss",
        ),
    ),
    "full, sharded": ("full_finetune_distributed", "full", ()),
    "lora, sharded": ("lora_finetune_distributed", "lora", ()),
    **{f"{kind}, sharded": (recipe, config, tuple(added)) for kind, (recipe, config, added) in OTHERS.items()},
    "full_dpo, ends sharded": (*OTHERS["full_dpo"][:2], (*OTHERS["full_dpo"][2], "custom_sharded_layers=[output]")),
    "kd, ends sharded": (*OTHERS["kd"][:2], (*OTHERS["kd"][2], "custom_sharded_layers=[output]")),
    "qat, checkpointing": (*OTHERS["qat"][:2], (*OTHERS["qat"][2], *CHECKPOINTING)),
}
"""Recipe, config of the quickstart, and overrides."""

SLOW = {case for case in CASES if "," in case and not case.endswith(", sharded")}


def config_of(case: str, *overrides: str, inputs: Path | str = "nowhere", out: Path | str = "nowhere") -> Any:
    _, name, added = CASES[case]
    cfg = OmegaConf.load(ROOT / "recipes" / "configs" / "quickstart" / f"{name}_single_device.yaml")
    line = [
        f"data_dir={inputs}", f"output_dir={out}", "dataset.split=train[:50]", "tokenizer.max_seq_len=64",
        "batch_size=4", "use_maximum_batch_size=False", "batch_increase_function=null",
        "adaptive_batching.recover_from_oom=False",
        *(f"model.{key}={value}" for key, value in ARCHITECTURE.items()), *added, *overrides,
    ]  # fmt: skip
    keys = {override.split("=")[0].lstrip("~"): override for override in line}  # the last one counts
    values: Any = OmegaConf.to_container(cfg, resolve=False)
    return _merge_yaml_and_cli_args(argparse.Namespace(**values), list(keys.values()))  # type: ignore[arg-type]


@contextlib.contextmanager
def devices_of(case: str) -> Iterator[int]:
    """As many devices as the recipe is for."""
    count = 2 if CASES[case][0].endswith("distributed") else 1
    group = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    with mock.patch.dict("os.environ", group if count > 1 else {}), on_devices(count):
        yield count


def real_host(case: str, cfg: Any) -> Host:
    """The recipe on this machine."""
    module: Any = importlib.import_module(f"recipes.{CASES[case][0]}")
    [recipe] = [
        each
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, AdaptiveBatching) and each is not AdaptiveBatching
    ]
    stock = load_stock(CASES[case][0])
    no_group = mock.patch.object(stock, "init_process_group", lambda *args, **kwargs: None)
    with no_group if hasattr(stock, "init_process_group") else contextlib.nullcontext():
        made: Any = recipe(cfg)
        made.setup(cfg)
    return as_one_of(made._session.host)


def as_one_of(host: Host) -> Host:
    """The rank without what it asks of others: agreement, and the norm of all shards."""
    return replace(host, ranks=Ranks(alone=True), clip_norm=None) if is_sharded(host.model) else host


def step_of(case: str, host: Host) -> TrainingStep:
    sample = Data(LENGTH, 50, pairs=RECIPES[CASES[case][0]] is preferences)[0]
    return training_step(host, sample, accumulates=False)


def planned(case: str, count: int, *overrides: str, allocations: Allocations | None = None) -> tuple[Host, TracedStep]:
    host, _ = set_up(CASES[case][0], config_of(case, *overrides), Data(LENGTH, 50), count, allocations)
    return host, trace_step(step_of(case, as_one_of(host)))


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum({s.data_ptr(): s.nbytes() for each in tensors for s in get_untyped_storages(each)}.values())


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.slow if case in SLOW else ()) for case in CASES])
def test_the_step_on_paper_is_that_of_the_recipe_and_takes_what_it_takes(
    case: str, inputs: Path, tmp_path: Path
) -> None:
    with devices_of(case) as count:
        allocations = Allocations()
        on_paper, ours = planned(case, count, allocations=allocations)
        host = real_host(case, config_of(case, inputs=inputs, out=tmp_path))
        step = step_of(case, host)
        traced = trace_step(step)
        models = [on_paper.model, *on_paper.objective.frozen_models]
        assert all(tensor.is_meta for model in models for tensor in [*model.parameters(), *model.buffers()])
        assert ours.is_uniform
        assert ours.curve.resting_bytes == traced.curve.resting_bytes
        for size in (1, 2, 30, 1000):
            assert ours.curve.peak_bytes(size) == traced.curve.peak_bytes(size), size
            assert ours.at(size).at_peak() == traced.at(size).at_peak()

        run = step.bind(step.model, step.optimizers)
        run(step.make_batch(BATCH))  # makes the optimizer states, and what a step keeps
        really = most_in_use(lambda: run(step.make_batch(BATCH)))
        assert trace_step(step).curve.peak_bytes(BATCH) == traced.curve.peak_bytes(BATCH), "after real steps, too"
    log = ours.at(BATCH).log
    assert max(log) - log[0] == pytest.approx(really, rel=0.01 if count == 1 else 0.02)
    assert log[0] - ours.curve.resting_bytes == bytes_of(kept_tensors(step.model)), "what a step keeps for the next"
    assert bytes_of(step.model.parameters()) <= allocations.so_far().most_bytes
