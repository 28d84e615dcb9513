"""A plan is made of the step that the probe would trace: to the byte, without weights, data or tokenizer."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from omegaconf import OmegaConf

from adaptive_batching._torchtune.host import Host
from adaptive_batching._torchtune.on_paper import RECIPES, Data, set_up
from adaptive_batching._torchtune.recipe import AdaptiveBatching
from adaptive_batching._torchtune.stock import load_stock
from adaptive_batching._torchtune.training_step import training_step
from adaptive_batching._trace.trace import trace_step
from adaptive_batching._trace.traced_step import TracedStep
from tests.conftest import ARCHITECTURE, ROOT

LENGTH = 48
SIZES = (1, 2, 4, 30, 1000)
LORA = ["model._component_=torchtune.models.llama2.lora_llama2"]
QUANTIZED = [*LORA, "model.quantize_base=True", "dtype=bf16"]


def config(kind: str, *overrides: str, inputs: Path | str = "nowhere", out: Path | str = "nowhere") -> Any:
    cfg = OmegaConf.load(ROOT / "recipes" / "configs" / "quickstart" / f"{kind}_single_device.yaml")
    common = [
        f"data_dir={inputs}", f"output_dir={out}", "dataset.split=train[:50]", "tokenizer.max_seq_len=64",
        "batch_size=4", "use_maximum_batch_size=False",
        *(f"model.{key}={value}" for key, value in ARCHITECTURE.items()),
    ]  # fmt: skip
    cfg = OmegaConf.merge(cfg, OmegaConf.from_dotlist([*common, *overrides]))
    cfg.batch_increase_function = None
    return cfg


def real_host(kind: str, cfg: Any) -> Host:
    """The recipe on this machine; ``kind`` is its name, or what it finetunes. It waits for no other ranks."""
    name = kind if kind in RECIPES else f"{kind}_finetune_single_device"
    module: Any = importlib.import_module(f"recipes.{name}")
    classes = [each for each in vars(module).values() if isinstance(each, type)]
    [recipe] = [each for each in classes if issubclass(each, AdaptiveBatching) and each is not AdaptiveBatching]
    with mock.patch.object(load_stock(name), "init_process_group", lambda *args, **kwargs: None, create=True):
        made: Any = recipe(cfg)
        made.setup(cfg)
    host: Host = made._session.host
    return host


def traced(host: Host, accumulation: int) -> TracedStep:
    sample = {"tokens": [1] * LENGTH, "labels": [1] * LENGTH}
    return trace_step(training_step(host, sample, accumulates=accumulation > 1))


def assert_same(ours: TracedStep, real: TracedStep) -> None:
    """Hold two steps against each other, to the byte."""
    assert ours.is_uniform
    assert ours.curve.resting_bytes == real.curve.resting_bytes
    for size in SIZES:
        assert ours.curve.peak_bytes(size) == real.curve.peak_bytes(size), size
        assert ours.at(size).at_peak() == real.at(size).at_peak()


CASES = {
    "full": ("full", []),
    "checkpointing": ("full", ["enable_activation_checkpointing=True", "dtype=bf16"]),
    "accumulation": ("full", ["gradient_accumulation_steps=3"]),
    "fused": ("full", ["optimizer.fused=True"]),
    "in_backward": ("full", ["optimizer_in_bwd=True", "clip_grad_norm=null"]),
    "sgd": ("full", ["optimizer._component_=torch.optim.SGD"]),
    "whole_logits": ("full", ["loss._component_=torch.nn.CrossEntropyLoss"]),
    "compiled": ("full", ["compile=True"]),
    "lora": ("lora", []),
    "dora": ("lora", ["model.use_dora=True"]),
    "qlora": ("lora", QUANTIZED),
    "qdora": ("lora", [*QUANTIZED, "model.use_dora=True", "enable_activation_checkpointing=True"]),
}


@pytest.mark.parametrize("case", CASES)
def test_the_step_on_paper_is_that_of_the_recipe_to_the_byte(case: str, inputs: Path, tmp_path: Path) -> None:
    kind, overrides = CASES[case]
    host = real_host(kind, config(kind, *overrides, inputs=inputs, out=tmp_path))
    cfg = config(kind, *overrides)
    on_paper, run = set_up(f"{kind}_finetune_single_device", cfg, Data(LENGTH, 50))
    assert all(tensor.is_meta for tensor in [*on_paper.model.parameters(), *on_paper.model.buffers()])
    ours, real = (traced(each, run.accumulation) for each in (on_paper, host))
    assert_same(ours, real)
    for size in SIZES:
        record = ours.at(size)
        assert sum(record.sizes[: record.num_resting]) == ours.curve.resting_bytes and min(record.sizes) >= 0
        assert max(record.log) == sum(record.at_peak()[1].values())


def test_setting_up_on_paper_leaves_random_numbers_and_functions_of_torch_as_they_are() -> None:
    state, load = torch.get_rng_state(), torch.nn.Module.load_state_dict
    set_up("full_finetune_single_device", config("full"), Data(LENGTH, 50))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.nn.Module.load_state_dict is load
