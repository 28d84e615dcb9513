"""``Trainer`` on the device: what a step asks of it, what 4-bit LoRA survives, and what the probe answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from adaptive_batching._dry_run.device import control
from adaptive_batching._report.events import find_record, read_events
from adaptive_batching._transformers.recording import Recording
from adaptive_batching.transformers import AdaptiveArguments
from tests.conftest import without_pages
from tests.emulated.trainer_on_ranks import FAULTS, IN_PARTS, WARM, Faults, run_all
from tests.support.environment import let_peft_pass_torchao
from tests.support.ranks import run_ranks
from tests.transformers.trainers import make_data, make_llama, make_trainer

GIB = 2**30
ON_DEVICE: dict[str, Any] = dict(use_cpu=False, num_train_epochs=1, logging_steps=1000)


@pytest.fixture(autouse=True)
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainer would spread a model over all devices of a process."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


class Steps(transformers.TrainerCallback):
    """Notes what each step has asked of the device, its data included."""

    def __init__(self) -> None:
        self.asked: list[control.Counters] = []
        self._last = control.counters()

    def on_step_end(self, args: Any, state: Any, control_: Any, **kwargs: Any) -> None:
        now = control.counters()
        self.asked.append(now - self._last)
        self._last = now


SAME, AUTO = AdaptiveArguments(), AdaptiveArguments(micro_batch_size="auto")
COSTS: dict[str, tuple[AdaptiveArguments, int, int]] = {
    # settings, the batches that Trainer accumulates for as many forwards, and those that ours accumulates
    "none set": (SAME, 1, 1),
    "auto": (AUTO, 1, 1),
    "split in 2": (AdaptiveArguments(micro_batch_size=4), 2, 1),
    "accumulated": (AdaptiveArguments(micro_batch_size=4), 2, 2),
}


@pytest.mark.parametrize("case", COSTS)
def test_a_step_asks_no_more_of_the_device_than_trainers_with_as_many_forwards(case: str, tmp_path: Path) -> None:
    settings, theirs, accumulated = COSTS[case]

    in_row = 1 if settings is AUTO else 0  # where its samples lie, their positions and bounds, is copied to the device

    def asked(name: str, ours: AdaptiveArguments | None, accumulated: int) -> control.Counters:
        steps = Steps()
        trainer = make_trainer(
            tmp_path / name, ours, callbacks=[steps], data=make_data(1)[:1] * 128, **ON_DEVICE,
            per_device_train_batch_size=8 // accumulated, gradient_accumulation_steps=accumulated, bf16=bool(in_row),
        )  # fmt: skip
        trainer.train()
        assert len(steps.asked) == 16
        return steps.asked[-3]

    stock, ours = asked("stock", None, theirs), asked("ours", settings, accumulated)
    assert ours.products == stock.products and ours.collectives == stock.collectives == 0
    assert ours.kernels <= stock.kernels
    assert ours.synchronizations <= stock.synchronizations
    assert ours.copies_to_device <= stock.copies_to_device + 2 * in_row
    assert ours.copies_to_host <= stock.copies_to_host + 1  # a record has the loss of each step, when it is there
    assert ours.device_allocations == ours.device_frees == 0


def four_bit_lora(folder: Path) -> Any:
    """Return a Llama whose weights are of 4 bits, with LoRA."""
    peft, _ = pytest.importorskip("peft"), pytest.importorskip("bitsandbytes")
    let_peft_pass_torchao()
    make_llama(hidden_size=64, intermediate_size=128).save_pretrained(folder)
    quantized = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantized, device_map={"": 0})
    config = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "up_proj"])
    return peft.get_peft_model(peft.prepare_model_for_kbit_training(model), config)


@pytest.mark.parametrize("ours", [IN_PARTS, replace(IN_PARTS, micro_batch_size="auto")], ids=["padded", "end to end"])
def test_4_bit_lora_with_checkpointing_and_bfloat16_survives_out_of_memory_anywhere_in_forward_and_backward(
    ours: AdaptiveArguments, tmp_path: Path
) -> None:
    faults, model = Faults(12), four_bit_lora(tmp_path / "model")
    assert "Linear4bit" in str(model)
    trainer = make_trainer(
        tmp_path, ours, model=model, callbacks=[faults], kind=faults.trainer(),
        bf16=True, gradient_checkpointing=True, data=make_data(1)[:1] * 8 * faults.steps, **ON_DEVICE,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == faults.steps
    assert trainer.adaptive.step.in_rows == (ours.micro_batch_size == "auto")
    # The first allocation is the copy of Trainer's sum of losses, for a retry: without room, it goes to the host.
    assert trainer.adaptive.num_recoveries == 12 - 1
    assert len({*faults.products[3::2]}) == 1, "what a recovery leaves changes no later step"


@pytest.mark.parametrize("in_parts", [False, True])
def test_the_probes_answer_trains_and_a_third_more_runs_out(in_parts: bool, tmp_path: Path) -> None:
    control.set_memory(6 * GIB)
    sizes = dict(hidden_size=256, intermediate_size=1024, vocab_size=8192, max_position_embeddings=512)
    row = list(range(1, 513))
    data = [{"input_ids": row, "labels": row}] * 512
    # Rows end to end are probed no further than what clearly fits.
    auto, largest = {"micro_batch_size": "auto", "padding": True}, {"use_maximum_batch_size": True}
    exact: dict[str, Any] = {"round_to_power_of_two": False, **(auto if in_parts else largest)}
    size = 256 if in_parts else 1

    def train(ours: AdaptiveArguments | None, size: int, accumulated: int = 1) -> Any:
        trainer = make_trainer(
            tmp_path, ours, model=make_llama(**sizes), data=data, **{**ON_DEVICE, "max_steps": 4},
            per_device_train_batch_size=size, gradient_accumulation_steps=accumulated, bf16=True,
        )  # fmt: skip
        trainer.train()
        return trainer

    found = train(AdaptiveArguments(**exact), size)
    answer = found.adaptive.max_tokens // 512 if in_parts else found.adaptive.probe.batch_size
    assert found.adaptive.probe.reason == "memory" and found.adaptive.num_recoveries == 0
    del found
    train(None, answer, 2 if in_parts else 1)
    with pytest.raises(torch.OutOfMemoryError):
        train(None, answer * 4 // 3, 2 if in_parts else 1)


def test_an_evaluation_with_more_than_fits_meets_that_once_and_takes_no_more_than_there_is(tmp_path: Path) -> None:
    control.set_memory(4 * GIB)
    row = list(range(1, 513))
    data = [{"input_ids": row, "labels": row}] * 256
    model = make_llama(hidden_size=256, intermediate_size=1024, vocab_size=8192, max_position_embeddings=512)
    trainer = make_trainer(
        tmp_path, AUTO, model=model, data=data, eval_dataset=data, per_device_eval_batch_size=256, **ON_DEVICE
    )
    trainer.evaluate()
    met, held = trainer.adaptive.evaluation.num_recoveries, torch.cuda.memory_allocated()
    assert 1 <= met <= 8
    trainer.evaluate()
    assert trainer.adaptive.evaluation.num_recoveries == met
    assert torch.cuda.memory_allocated() <= held


def test_recording_a_step_waits_for_nothing(tmp_path: Path) -> None:
    asked = {}
    for records in (False, True):
        steps = Steps()
        trainer = make_trainer(
            tmp_path / str(records), AdaptiveArguments(micro_batch_size=4), logging_nan_inf_filter=False,
            callbacks=[steps], **{**ON_DEVICE, "num_train_epochs": 4},
        )  # fmt: skip
        if not records:
            trainer.remove_callback(Recording)
        with without_pages():
            trainer.train()
        asked[records] = steps.asked[3:18]
    assert len(read_events(find_record(tmp_path / "True"))["step"]) == 20
    waits, kernels = (
        {records: sum(getattr(each, name) for each in steps) for records, steps in asked.items()}
        for name in ("synchronizations", "kernels")
    )
    assert waits[True] <= waits[False] and kernels[True] == kernels[False]


RUNS = ("ddp llama", "fsdp checkpointed", "fsdp bfloat16")  # FSDP leaves its environment


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("on_ranks")
    return run_ranks(run_all, folder, RUNS, folder=folder, forks=False)


@pytest.mark.wide
@pytest.mark.xdist_group("trainer_on_ranks")
@pytest.mark.parametrize("name", RUNS)
def test_where_one_of_two_devices_is_full_both_run_the_step_again(name: str, ranks: list[dict[str, Any]]) -> None:
    for found in (rank[name] for rank in ranks):
        assert found["steps"] == WARM + 2 * FAULTS
        assert found["recoveries"] == FAULTS - 1, "the first meets the copy of Trainer's sum of losses, for a retry"
        products: list[int] = found["products"]
        undisturbed = products[1]  # the first step is audited
        assert {*products[1:WARM], *products[WARM + 1 :: 2]} == {undisturbed}, (
            "what a recovery leaves changes no later step"
        )
        assert min(products[WARM::2]) >= undisturbed > 0, "nothing is left out"
