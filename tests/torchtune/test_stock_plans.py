"""Every stock config of the covered recipes gets a plan: in little memory, without files, with sound figures."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from torchtune import _recipe_registry as registry

from adaptive_batching._torchtune.plan.meta_setup import RECIPES, Data, on_devices, set_up
from adaptive_batching._torchtune.plan.planning import CONFIGS, PlanRequest, sketch
from adaptive_batching._trace.allocator import GIB
from tests.support.processes import in_a_process

LENGTH = 512
# One of each kind; the others are marked slow
SOME = {"llama3_2/1B_qlora_single_device", "llama3_2/1B_full"}

STOCK = [
    pytest.param(recipe.name, config.file_path, id=config.name, marks=[] if config.name in SOME else pytest.mark.slow)
    for recipe in registry.get_all_recipes()
    if recipe.name in RECIPES
    for config in recipe.configs
    if "vision" not in config.name
]
assert {case.id for case in STOCK} >= SOME


def plan(recipe: str, path: str, devices: int) -> SimpleNamespace:
    """A plan of a config, and the memory and the connections that it took, in a process of its own."""
    connections = []
    sys.addaudithook(lambda event, args: connections.append(args) if event == "socket.connect" else None)
    cfg: Any = OmegaConf.load(CONFIGS / path)
    made = sketch(PlanRequest(recipe, cfg, devices), LENGTH)
    with on_devices(devices):
        host, _ = set_up(recipe, cfg, Data(LENGTH, 64 * devices), devices)
        buffer_bytes = sum(buffer.nbytes for buffer in host.model.buffers())
    need = made.forecast.need(cfg.batch_size)
    return SimpleNamespace(
        need=need, parameters=made.parameters, trained=made.trained_parameters, frozen=made.frozen_parameters,
        largest=made.forecast.largest(need.most_bytes),  # in just the memory that the config's batch needs
        buffer_bytes=buffer_bytes,  # tables of positions; with LoRA, stock's Qwen 2.5 has one in each layer
        memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, connections=len(connections),
    )  # fmt: skip


@pytest.mark.parametrize(("recipe", "path"), STOCK)
def test_every_stock_config_gets_a_plan(recipe: str, path: str) -> None:
    cfg: Any = OmegaConf.load(CONFIGS / path)
    files = [cfg.tokenizer.get("path"), cfg.checkpointer.checkpoint_dir]
    assert not any(Path(file or "nowhere").exists() for file in files)
    devices = 8 if recipe.endswith("distributed") else 1
    made = in_a_process(plan, recipe, path, devices)
    need = made.need
    assert made.memory_bytes < 4 * GIB
    assert not made.connections

    said = re.findall(r"(?:/|to_)(\d+(?:\.\d+)?)B_", path)  # of a distillation, the one that learns
    billions = float(said[-1]) if said else 3.8  # Phi 3 mini
    assert 0.9 < made.parameters / 1e9 / billions < 1.35
    trains_all = "lora" not in recipe and not recipe.startswith("knowledge")
    if trains_all:
        assert made.trained == made.parameters
    else:
        assert 0 < made.trained < 0.05 * made.parameters

    quantized = "qlora" in path or "qdora" in path
    share = (made.parameters + made.frozen) / devices
    if not cfg.get("fsdp_cpu_offload", False):
        assert (0.5 if quantized else 2) * share * 0.95 < need.resting_bytes
    assert need.resting_bytes < 2 * share + 16 * made.trained / devices + made.buffer_bytes + GIB
    assert need.resting_bytes < need.peak_bytes <= need.reserved.by_default < 1.6 * need.peak_bytes + GIB
    assert need.peak_bytes <= need.reserved.least <= need.reserved.by_default
    assert 0 <= need.recomputed_flops < need.flops
    sequences = 2 if "dpo" in recipe else 1
    reference = made.parameters if recipe.startswith("lora_dpo") else made.frozen  # runs forward alone
    of_a_token = (need.flops - need.recomputed_flops) / (cfg.batch_size * LENGTH * sequences)
    of_a_parameter = (of_a_token - 2 * reference) / made.parameters
    assert (4.5 if trains_all else 3) < of_a_parameter < 7
    assert made.largest >= cfg.batch_size
