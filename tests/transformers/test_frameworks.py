"""Frameworks that make the trainer: our plugins with what they rely on, and, slow, each framework's own command line.

The slow tests run where a framework is installed: `make test-stacks-all` makes an environment for each.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import DataLoader

from adaptive_batching import ConfigError
from tests.support import stacks
from tests.transformers import trainers
from tests.transformers.trainers import assert_alike, make_trainer


def is_installed(stack: str) -> bool:
    package = {"swift": "swift.trainers"}.get(stack, stack)
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def installed(stack: str) -> Any:
    return pytest.mark.skipif(not is_installed(stack), reason=f"{stack} is not installed")


@pytest.fixture
def of_axolotl(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Our module for axolotl, on a stand-in for its base class where axolotl is not installed."""
    if importlib.util.find_spec("axolotl") is None:
        base = ModuleType("axolotl.integrations.base")
        base.BasePlugin = type("BasePlugin", (), {})  # type: ignore[attr-defined]
        packages = {name: ModuleType(name) for name in ("axolotl", "axolotl.integrations")}
        packages["axolotl"].__spec__ = SimpleNamespace()  # type: ignore[assignment]
        for name, module in {**packages, base.__name__: base}.items():
            monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "adaptive_batching.axolotl", raising=False)
    return importlib.import_module("adaptive_batching.axolotl")


def test_the_plugin_for_axolotl_adopts_its_trainer_by_one_key(tmp_path: Path, of_axolotl: Any) -> None:
    plugin = of_axolotl.AdaptivePlugin()
    module, _, name = plugin.get_input_args().rpartition(".")
    assert getattr(importlib.import_module(module), name)(adaptive="auto").adaptive == "auto"
    ours, stock = make_trainer(tmp_path), make_trainer(tmp_path)
    plugin.post_trainer_create(SimpleNamespace(adaptive={"micro_batch_size": 3}, sample_packing=False), ours)
    plugin.post_trainer_create(SimpleNamespace(adaptive=None, sample_packing=True), stock)
    assert type(stock) is transformers.Trainer
    for trainer in (ours, stock):
        trainer.train()
    assert ours.adaptive is not None
    assert_alike(ours, stock)
    with pytest.raises(ConfigError, match=r"sample_packing: true .* is not needed: .* set sample_packing: false"):
        plugin.post_trainer_create(SimpleNamespace(adaptive="auto", sample_packing=True), stock)
    with pytest.raises(ConfigError, match="adaptive has no setting 'micro_batch'"):
        plugin.post_trainer_create(SimpleNamespace(adaptive={"micro_batch": 3}, sample_packing=False), stock)


class ShardOfSwift:
    """A sampler of batches as ms-swift has one: none of torch's."""

    drop_last = False

    def __init__(self, total: int, batch_size: int) -> None:
        self.total_samples, self.batch_size, self.epoch = total, batch_size, 0

    def __iter__(self) -> Any:
        order = torch.randperm(self.total_samples, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return (order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size))

    def __len__(self) -> int:
        return -(-self.total_samples // self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class LoaderOfSwift(DataLoader[Any]):
    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]

    def __iter__(self) -> Any:
        yield from super().__iter__()


class TrainerOfSwift(transformers.Trainer):  # type: ignore[misc, name-defined]
    def _prepare_inputs(self, inputs: Any) -> Any:
        return super()._prepare_inputs(inputs)

    def get_train_dataloader(self, skip_batches: int = 0) -> Any:
        sampler = ShardOfSwift(len(self.train_dataset), self._train_batch_size)
        return LoaderOfSwift(self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator)


@pytest.mark.skipif(is_installed("swift"), reason="ms-swift itself is tried below, and changes every Trainer")
def test_a_trainer_of_ms_swift_trains_with_its_own_order_of_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from adaptive_batching.swift import adopting

    monkeypatch.setenv("ADAPTIVE_BATCHING_SETTINGS", "micro_batch_size=3")
    ours = make_trainer(tmp_path, kind=adopting(TrainerOfSwift))
    ours.train()
    assert ours.adaptive is not None
    assert_alike(ours, trainers.trained(tmp_path, kind=TrainerOfSwift))


@installed("axolotl")
def test_axolotl_calls_a_plugin_as_ours_expects() -> None:
    base = importlib.import_module("axolotl.integrations.base").BasePlugin
    assert [*inspect.signature(base.post_trainer_create).parameters] == ["self", "cfg", "trainer"]
    assert [*inspect.signature(base.get_input_args).parameters] == ["self"]


@installed("swift")
def test_ms_swift_has_what_our_plugin_takes() -> None:
    factory = importlib.import_module("swift.trainers.trainer_factory").TrainerFactory
    assert {"causal_lm", "seq_cls", "dpo", "rm"} <= factory.TRAINER_MAPPING.keys()
    shard = importlib.import_module("swift.dataloader.shard").BatchSamplerShard(8, 2, False, False, None)
    assert (shard.total_samples, shard.batch_size, shard.drop_last, len(shard)) == (8, 2, False, 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("stacks")
    stacks.make_inputs(made)
    return made


OF_STACKS = [
    pytest.param(stack, name, id=f"{stack} {name}", marks=installed(stack))
    for stack, kinds in stacks.KINDS.items()
    for name in kinds
]


@pytest.mark.slow
@pytest.mark.parametrize(("stack", "name"), OF_STACKS)
def test_a_framework_trains_by_its_own_command_line_as_without_us(folder: Path, stack: str, name: str) -> None:
    """So it does when memory runs out in its model again and again."""
    kind = stacks.KINDS[stack][name]
    stock = stacks.train(stack, folder, f"{stack}-{name}-stock", None, **kind)
    for way, settings in stacks.WAYS.items():
        found = stacks.train(stack, folder, f"{stack}-{name}-{way}", **settings, **kind)
        losses, weights = found.apart(stock)
        assert losses <= 1e-4 and weights <= 2e-5, (way, losses, weights)
        assert all("oom_retries" in each for each in found.logged)
        assert (found.recoveries > 0) == (way == "short")
        if way == "auto" and name == "SFT":
            assert found.padding == 1


@pytest.mark.slow
@pytest.mark.parametrize("stack", [pytest.param(stack, marks=installed(stack)) for stack in stacks.STACKS])
def test_the_example_of_a_framework_trains(folder: Path, stack: str) -> None:
    settings = None if stack == "axolotl" else "auto"  # axolotl's has them in its file
    found = stacks.train(stack, folder, f"{stack}-example", settings, **stacks.example(stack))
    assert len(found.logged) == stacks.STEPS and all("oom_retries" in each for each in found.logged)
    assert found.padding == 1


@pytest.mark.slow
@installed("axolotl")
def test_axolotl_says_that_packing_is_not_needed(folder: Path) -> None:
    ran = stacks.command("axolotl", folder, "packed", "auto", sample_packing=True)
    assert ran.returncode != 0 and "is not needed: adaptive runs samples without padding" in ran.stderr + ran.stdout
