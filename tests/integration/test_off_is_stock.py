"""With neither field set, our recipes train as torchtune's own: the same bits."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import TuneRun, assert_same_weights
from tests.support.overrides import WIDE

PART = {
    "_component_": "torchtune.datasets.instruct_dataset", "source": "json", "data_files": "${data_dir}/train.json",
    "column_map": {"input": "instruction", "output": "output"},
}  # fmt: skip
TWO_DATA_SETS = [{**PART, "split": "train[:20]"}, {**PART, "split": "train[20:45]"}]
CHECKPOINTING, COMPILED, PACKED = "enable_activation_checkpointing=True", "compile=True", "dataset.packed=True"
DROPOUT = "model.lora_dropout=0.1"
# 12 batches: 2 windows of 5, and 2 batches that stock carries into the next epoch
ACCUMULATION = "gradient_accumulation_steps=5"
CASES: dict[str, tuple[Any, ...]] = {
    "full": ("full", ACCUMULATION),
    "full, checkpointing, few steps, no clipping": (
        "full", CHECKPOINTING, "max_steps_per_epoch=3", "gradient_accumulation_steps=2", "clip_grad_norm=null",
    ),
    "full, in the backward pass, packed": (
        "full", "optimizer_in_bwd=True", "clip_grad_norm=null", PACKED, "batch_size=2",
    ),
    "full, compiled, profiled": (
        "full", COMPILED, "profiler.enabled=True", "profiler.cpu=True", "profiler.cuda=False",
        "profiler.output_dir=${output_dir}/profile", "profiler.wait_steps=1",
        "profiler.warmup_steps=1", "profiler.active_steps=2", "profiler.num_cycles=1",
    ),
    "full, without a scheduler, two data sets": ("full", {"lr_scheduler": None, "dataset": TWO_DATA_SETS}),
    "lora": ("lora", ACCUMULATION, DROPOUT),
    "lora, compiled, packed": ("lora", COMPILED, PACKED, "batch_size=2"),
    "dora, checkpointing": ("lora", "model.use_dora=True", CHECKPOINTING),
    "qlora": ("lora", "model.quantize_base=True", *WIDE),
    "kd": ("kd", ACCUMULATION, DROPOUT),
    "kd, whole logits, packed": (
        "kd", "loss._component_=torch.nn.CrossEntropyLoss", "kd_loss._component_=torchtune.modules.loss.ForwardKLLoss",
        PACKED, "batch_size=2",
    ),
    "lora_dpo": ("lora_dpo", ACCUMULATION, DROPOUT),
    "lora_dpo, checkpointing, another loss": (
        "lora_dpo", CHECKPOINTING, "loss._component_=torchtune.rlhf.loss.RSOLoss", "~loss.beta"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_off_gives_the_bits_of_the_stock_recipe(case: str, tune_run: TuneRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "aot_eager")  # needs no compiler; torchtune reads it
    overrides = [each for each in CASES[case] if isinstance(each, str)]
    replaced = next((each for each in CASES[case] if isinstance(each, dict)), {})
    stock = tune_run(*overrides, name="stock", stock=True, replaced=replaced)
    ours = tune_run(*overrides, name="ours", replaced=replaced)
    assert len(stock.metrics) >= 4
    assert ours.metrics == stock.metrics
    assert_same_weights(ours.weights(epoch=1), stock.weights(epoch=1))


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_off_resumes_as_the_stock_recipe_does(kind: str, tune_run: TuneRun) -> None:
    resume = ["resume_from_checkpoint=True", "epochs=3"]
    if kind == "full":
        resume.append("checkpointer.checkpoint_files=[epoch_1/model-00001-of-00001.safetensors]")
    for name in ("stock", "ours"):
        tune_run(kind, "epochs=3", name=name, stock=name == "stock")
    stock, ours = (tune_run(kind, *resume, name=name, stock=name == "stock") for name in ("stock", "ours"))
    assert ours.metrics == stock.metrics
    assert_same_weights(ours.weights(epoch=2), stock.weights(epoch=2))
