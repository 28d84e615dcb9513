"""A plan is made of the step that the probe would trace, to the byte, and a real step on the CPU takes what it says.

On several devices the rank's peers are a process group that is none, so that numbers are nonsense; memory is not.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.distributed._tools.common_utils import get_untyped_storages
from torch.distributed.tensor import DTensor
from torchao.dtypes.nf4tensor import to_nf4
from torchtune.modules.peft import get_adapter_params

from adaptive_batching._ranks.agree import Ranks
from adaptive_batching._ranks.fsdp import is_sharded
from adaptive_batching._torchtune.plan.meta_setup import RECIPES, Allocations, Data, on_devices, set_up
from adaptive_batching._torchtune.stock.host import Host
from adaptive_batching._torchtune.stock.loading import load_stock
from adaptive_batching._torchtune.stock.losses import preferences
from adaptive_batching._torchtune.train.recipe import AdaptiveBatching
from adaptive_batching._torchtune.train.training_step import training_step
from adaptive_batching._trace.recorder import state_tensors
from adaptive_batching._trace.trace import trace_step
from adaptive_batching._trace.traced_step import TracedStep
from adaptive_batching._trace.training import TrainingStep, kept_tensors
from tests.conftest import ARCHITECTURE, QUICKSTART
from tests.integration.two_ranks import OTHERS
from tests.support.overrides import TEACHER, WIDE
from tests.support.steps import most_in_use

LENGTH, BATCH = 48, 16
SIZES = (1, 2, 4, 30, 1000)


def config(kind: str, *overrides: str, inputs: Path | str = "nowhere", out: Path | str = "nowhere") -> Any:
    cfg: Any = OmegaConf.load(QUICKSTART / f"{kind}_single_device.yaml")
    common = [
        f"data_dir={inputs}", f"output_dir={out}", "dataset.split=train[:50]", "tokenizer.max_seq_len=64",
        "batch_size=4", "use_maximum_batch_size=False",
        *(f"model.{key}={value}" for key, value in ARCHITECTURE.items()),
    ]  # fmt: skip
    given = [override for override in overrides if not override.startswith("~")]
    cfg = OmegaConf.merge(cfg, OmegaConf.from_dotlist([*common, *given]))
    cfg.batch_increase_function = None
    for override in set(overrides) - set(given):
        del cfg.model[override.removeprefix("~model.")]
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


def step_of(host: Host, sample: Any = None, *, accumulates: bool = False) -> TrainingStep:
    """The step of a rank, without what it asks of others: agreement, and the norm of all shards."""
    alone = replace(host, ranks=Ranks(alone=True), clip_norm=None) if is_sharded(host.model) else host
    return training_step(alone, sample or Data(LENGTH, 50)[0], accumulates=accumulates)


def transient_bytes(step: TrainingStep, batch_size: int = BATCH) -> int:
    """Most bytes that a real step has in use beyond those between steps, as torch's profiler counts them."""
    run = step.bind(step.model, step.optimizers)
    run(step.make_batch(batch_size))  # makes the optimizer states, and what a step keeps
    return most_in_use(lambda: run(step.make_batch(batch_size)))  # the batch is in use, too


def predicted_bytes(step: TracedStep, batch_size: int = BATCH) -> int:
    log = step.record_at(batch_size).log
    return max(log) - log[0]


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum({s.data_ptr(): s.nbytes() for each in tensors for s in get_untyped_storages(each)}.values())


def assert_same(ours: TracedStep, real: TracedStep) -> None:
    """Hold two steps against each other, to the byte, and a step against itself."""
    assert ours.is_uniform
    assert ours.curve.resting_bytes == real.curve.resting_bytes
    for size in SIZES:
        record = ours.record_at(size)
        assert ours.curve.peak_bytes(size) == real.curve.peak_bytes(size) == max(record.log), size
        assert record.at_peak() == real.record_at(size).at_peak()
        assert sum(record.sizes[: record.num_resting]) == record.log[0] and min(record.sizes) >= 0
        assert max(record.log) == sum(record.at_peak()[1].values())


@dataclass(frozen=True)
class Case:
    recipe: str
    config: str  # of the quickstart
    overrides: list[str]
    length: int = LENGTH
    batch_size: int = BATCH
    rel: float = 0.01  # of what a real step takes, around what is predicted


def one(kind: str, *overrides: str, **others: Any) -> Case:
    return Case(f"{kind}_finetune_single_device", kind, [*overrides], **others)


def few(*overrides: str) -> Case:
    """A step of so few tokens that the optimizer sets the peak."""
    return one("full", *overrides, length=8, batch_size=2)


def shard(kind: str, *overrides: str) -> Case:
    recipe, of, added = OTHERS.get(kind, (f"{kind}_finetune_distributed", kind, []))
    return Case(recipe, of, [*added, *overrides], batch_size=6, rel=0.02)


CHECKPOINTING, COMPILED = "enable_activation_checkpointing=True", "compile=True"
QUANTIZED, LORA = "model.quantize_base=True", "model._component_=torchtune.models.llama2.lora_llama2"
DPO, KD = ("lora_dpo_single_device", "lora_dpo"), ("knowledge_distillation_single_device", "lora")
IN_BACKWARD = ["optimizer_in_bwd=True", "clip_grad_norm=null"]
CASES = {
    "full": one("full"),
    "checkpointing": one("full", CHECKPOINTING),
    "accumulation": one("full", "gradient_accumulation_steps=3"),
    "whole logits": one("full", "loss._component_=torch.nn.CrossEntropyLoss"),
    "lora": one("lora"),
    "qlora": one("lora", *WIDE, LORA, QUANTIZED),
    "qdora": one("lora", *WIDE, LORA, QUANTIZED, "dtype=bf16", "model.use_dora=True", CHECKPOINTING),
    "few tokens": few(),
    "fused": few("optimizer.fused=True"),
    "in backward": few(*IN_BACKWARD),
    "lora_dpo": Case(*DPO, []),
    "kd": Case(*KD, TEACHER),
    **{f"{kind}, sharded": shard(kind) for kind in ("full", "lora", *OTHERS)},
}

LONG = {"qdora", "qat_lora, sharded"}


@contextlib.contextmanager
def devices_of(recipe: str) -> Iterator[int]:
    """As many devices as the recipe is for."""
    count = 2 if recipe.endswith("distributed") else 1
    group = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    with mock.patch.dict("os.environ", group if count > 1 else {}), on_devices(count):
        yield count


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LONG else []) for name in CASES]
)
def test_the_step_on_paper_is_that_of_the_recipe_and_takes_what_it_takes(
    name: str, inputs: Path, tmp_path: Path
) -> None:
    case = CASES[name]
    added = ["adaptive_batching.recover_from_oom=False", *case.overrides]
    sample = Data(case.length, 50, pairs=RECIPES[case.recipe] is preferences)[0]
    allocations = Allocations()
    with devices_of(case.recipe) as count:
        host, run = set_up(case.recipe, config(case.config, *added), Data(case.length, 50), count, allocations)
        assert all(tensor.is_meta for each in host.models for tensor in [*each.parameters(), *each.buffers()])
        ours = trace_step(step_of(host, sample, accumulates=run.accumulation > 1))
        real = real_host(case.recipe, config(case.config, *added, inputs=inputs, out=tmp_path))
        step = step_of(real, sample, accumulates=run.accumulation > 1)
        traced = trace_step(step)
        assert_same(ours, traced)
        assert predicted_bytes(ours, case.batch_size) == pytest.approx(
            transient_bytes(step, case.batch_size), rel=case.rel
        )
        assert trace_step(step).curve.peak_bytes(9) == traced.curve.peak_bytes(9), "after real steps, too"
    resting = ours.curve.resting_bytes
    kept = bytes_of(kept_tensors(step.model))
    assert ours.record_at(case.batch_size).log[0] - resting == kept, "what a step keeps for the next"
    assert bytes_of(step.model.parameters()) <= allocations.so_far().most_bytes
    if count == 1:  # some tensors of NF4 are views of larger ones
        there = [*step.model.parameters(), *step.model.buffers(), *state_tensors(real.optimizers)]
        assert resting == pytest.approx(bytes_of(there), rel=0.01 if QUANTIZED in added else 0)


def test_a_compiled_step_on_paper_is_that_of_the_recipe(inputs: Path, tmp_path: Path) -> None:
    """It leaves random numbers and functions of torch as they are, too."""
    state, load = torch.get_rng_state(), nn.Module.load_state_dict
    meta_setup, _ = set_up("full_finetune_single_device", config("full", COMPILED), Data(LENGTH, 50))
    assert torch.equal(torch.get_rng_state(), state)
    assert nn.Module.load_state_dict is load
    real = real_host("full", config("full", COMPILED, inputs=inputs, out=tmp_path))
    assert_same(*(trace_step(step_of(host)) for host in (meta_setup, real)))


def loaded(model: nn.Module, *, on_host: bool = False) -> int:
    allocations = Allocations()
    allocations.load(model, on_host=on_host)
    return allocations.so_far().most_bytes


def test_quantizing_a_weight_takes_what_it_really_takes() -> None:
    weight, meta_setup = torch.randn(512, 1024, dtype=torch.bfloat16), nn.Module()
    with torch.device("meta"):
        meta_setup.weight = nn.Parameter(to_nf4(torch.empty_like(weight, device="meta")), requires_grad=False)
    quantized = to_nf4(weight)
    really = most_in_use(lambda: quantized.copy_(weight))
    # On another device than the weight's, a copy of the weight comes first.
    assert loaded(meta_setup) == pytest.approx(really + weight.nbytes, rel=0.02)


def test_loading_what_is_not_quantized_takes_no_more_than_the_model() -> None:
    allocations = Allocations()
    with allocations:
        model = nn.Linear(64, 32, device="meta")
    allocations.load(model)
    assert allocations.so_far().most_bytes == (64 * 32 + 32) * 4


def test_each_weight_is_whole_for_a_moment_on_several_devices() -> None:
    seen = Allocations()
    with on_devices(4):
        host, _ = set_up("lora_finetune_distributed", config("lora", LORA), Data(LENGTH, 50), 4, seen)
        on_host = loaded(host.model, on_host=True)
    assert all(isinstance(parameter, DTensor) for parameter in host.model.parameters())
    adapters = get_adapter_params(host.model)
    sizes = {name: each.numel() * each.element_size() for name, each in sorted(host.model.named_parameters())}
    whole = [size for name, size in sizes.items() if name not in adapters]
    held = sum(buffer.nbytes for buffer in host.model.buffers()) + sum(sizes[name] for name in adapters) / 4
    at_most = max(sum(whole[: number + 1]) / 4 + weight for number, weight in enumerate(whole))
    assert seen.so_far().most_bytes == pytest.approx(held + at_most, rel=0.01)
    assert on_host == pytest.approx(max(whole) * 5 / 4, rel=0.01)
