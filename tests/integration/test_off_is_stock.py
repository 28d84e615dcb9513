"""With no field set, our recipes are torchtune's own, and nothing recovers; recovery alone is a field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torchtune.datasets import SFTDataset

from adaptive_batching import ConfigError
from adaptive_batching._memory.out_of_memory import is_out_of_memory
from adaptive_batching._torchtune.stock.loading import stock_recipe
from adaptive_batching.torchtune import NextToken, Watcher, recipe
from tests.conftest import QUICKSTART, RECIPES, TuneRun, assert_same_weights, small_run
from tests.integration.faults import disarm, plan
from tests.support.overrides import RECOVER, WIDE
from tests.support.records import without_sizes
from tests.support.wide import few

DROPOUT = "model.lora_dropout=0.1"
# 12 batches: 2 windows of 5, and 2 batches that stock carries into the next epoch
ACCUMULATION = "gradient_accumulation_steps=5"
CASES = {
    "full": [ACCUMULATION],
    "lora": [ACCUMULATION, DROPOUT],
    "kd": [ACCUMULATION, DROPOUT],
    "lora_dpo": [ACCUMULATION, DROPOUT],
}


PART = {
    "_component_": "torchtune.datasets.instruct_dataset", "source": "json", "data_files": "${data_dir}/train.json",
    "column_map": {"input": "instruction", "output": "output"},
}  # fmt: skip
TWO_DATA_SETS = [{**PART, "split": "train[:20]"}, {**PART, "split": "train[20:45]"}]
CHECKPOINTING, PACKED = "enable_activation_checkpointing=True", ["dataset.packed=True", "batch_size=2"]
RECOVERING: dict[str, tuple[Any, ...]] = {
    "full, compiled, profiled": (
        "full", "compile=True", "profiler.enabled=True", "profiler.cpu=True", "profiler.cuda=False",
        "profiler.output_dir=${output_dir}/profile", "profiler.wait_steps=1",
        "profiler.warmup_steps=1", "profiler.active_steps=2", "profiler.num_cycles=1",
    ),
    "full, without a scheduler, two data sets": ("full", {"lr_scheduler": None, "dataset": TWO_DATA_SETS}),
    "qlora, packed": ("lora", "model.quantize_base=True", *WIDE, *PACKED),
    "dora, checkpointing": ("lora", "model.use_dora=True", CHECKPOINTING),
}  # fmt: skip


@pytest.mark.parametrize("case", few(RECOVERING, "qlora, packed"))
def test_with_recovery_alone_losses_and_weights_are_stocks(
    case: str, tune_run: TuneRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where an epoch has whole windows alone; that of a distillation has another gradient."""
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "aot_eager")  # needs no compiler; torchtune reads it
    common = [each for each in RECOVERING[case] if isinstance(each, str)]
    replaced = next((each for each in RECOVERING[case] if isinstance(each, dict)), {})
    stock = tune_run(*common, "epochs=1", name="stock", stock=True, replaced=replaced)
    ours = tune_run(*common, "epochs=1", *RECOVER, name="ours", replaced=replaced)
    assert len(stock.metrics) >= 4 and without_sizes(ours.metrics) == stock.metrics
    assert_same_weights(ours.weights(epoch=0), stock.weights(epoch=0))


def test_batches_of_a_step_are_read_between_forwards_as_stock_reads_them(
    tune_run: TuneRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a data set draws, as to augment, and dropout does."""
    read = SFTDataset.__getitem__

    def drawing(self: SFTDataset, index: int) -> Any:
        torch.rand(1)
        return read(self, index)

    monkeypatch.setattr(SFTDataset, "__getitem__", drawing)
    common = ["lora", "gradient_accumulation_steps=3", DROPOUT, "epochs=1"]
    stock = tune_run(*common, name="stock", stock=True)
    ours = tune_run(*common, *RECOVER, name="ours")
    assert len(stock.metrics) >= 4 and without_sizes(ours.metrics) == stock.metrics


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The recipes of ours that have run stock's ``train``."""
    ran: list[str] = []
    for name in {name for name, *_ in RECIPES.values()}:
        stock = stock_recipe(name)

        def train(self: Any, *, name: str = name, of_stock: Any = stock.train) -> None:
            ran.append(name)
            of_stock(self)

        monkeypatch.setattr(stock, "train", train)
    return ran


@pytest.mark.parametrize("kind", few(CASES, "full", "lora_dpo"))
def test_off_is_the_stock_recipe(kind: str, tune_run: TuneRun, trained: list[str]) -> None:
    stock = tune_run(kind, *CASES[kind], name="stock", stock=True)
    ours = tune_run(kind, *CASES[kind], "adaptive_batching.recover_from_oom=False", name="ours")
    assert trained == [RECIPES[kind][0]]
    assert len(stock.metrics) >= 4 and ours.metrics == stock.metrics
    assert_same_weights(ours.weights(epoch=1), stock.weights(epoch=1))
    assert not (ours.output_dir / "adaptive_batching").exists()


def test_off_resumes_as_the_stock_recipe_does(tune_run: TuneRun) -> None:
    resume = ["resume_from_checkpoint=True", "epochs=3"]
    resume.append("checkpointer.checkpoint_files=[epoch_1/model-00001-of-00001.safetensors]")
    for name in ("stock", "ours"):
        tune_run("full", "epochs=3", name=name, stock=name == "stock")
    stock, ours = (tune_run("full", *resume, name=name, stock=name == "stock") for name in ("stock", "ours"))
    assert ours.metrics == stock.metrics
    assert_same_weights(ours.weights(epoch=2), stock.weights(epoch=2))


def test_an_out_of_memory_error_passes_through_and_the_command_names_the_field(
    tune_run: TuneRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the same run recovers from with the field: ``test_recovery.py``."""
    errors: list[Exception] = []
    stock = stock_recipe("full_finetune_single_device")
    train = stock.train

    def noted(self: Any) -> None:
        try:
            train(self)
        except Exception as error:
            errors.append(error)
            raise

    monkeypatch.setattr(stock, "train", noted)
    disarm()
    plan.update(where="backward", call=2, times=1)
    faulty = ["model._component_=tests.integration.faults.full_model", "epochs=1"]
    with pytest.raises(SystemExit, match=r"error: out of memory in training .*set adaptive_batching.recover_from_oom"):
        tune_run("full", *faulty)
    assert is_out_of_memory(errors[0])


def test_a_loss_and_a_watcher_of_ones_own_are_not_left_out(inputs: Path, tmp_path: Path) -> None:
    """A loss counts as a field that is set; a watcher asks for one."""
    weights: list[float | None] = []

    class Noted(NextToken):
        def loss(self, model: Any, batch: Any, weight: float | None) -> Any:
            weights.append(weight)
            return super().loss(model, batch, weight)

    few = small_run(inputs, tmp_path, "epochs=1", "dataset.split=train[:8]", "lr_scheduler.num_warmup_steps=1")
    cfg = OmegaConf.merge(OmegaConf.load(QUICKSTART / "full_single_device.yaml"), OmegaConf.from_dotlist(few))
    made = recipe("full_finetune_single_device", lambda parts: Noted(parts.collate, parts.loss, parts.activations))(cfg)
    made.setup(cfg)
    made.train()
    made.cleanup()
    assert weights == [None, None]

    watched = recipe("full_finetune_single_device")(cfg)
    watched.watchers.append(Watcher())
    with pytest.raises(ConfigError, match=r"does not notify watchers; set adaptive_batching.recover_from_oom=True"):
        watched.setup(cfg)
