"""An epoch with Hugging Face's ``Trainer`` on a GPU, in several ways: the section "Trainer" of ``gpu.py``.

A Llama of half a billion parameters in bfloat16, with weights that are drawn on the device, sees docstrings of Python's
standard library by words, each four times over and at most 1,024 long, 64 in an optimizer step. ``Trainer``,
``group_by_length`` and ``batch_rebalance`` have the largest power of two of the longest samples of which a forward and
backward leave a tenth of the memory free, accumulated to 64; ``padding_free`` begins with that, too, and lays samples
end to end, without flash-attn.

Tokens in a second and the peak are of the steps after the first few; ``set_up_seconds`` is the time from the call of
``train`` to its first step, with the probe, and ``whole_seconds`` is all of ``train``. Losses are held against those of
``Trainer`` where steps have the same samples: in the first step, which began with the same weights, and the worst.
"""

from __future__ import annotations

import itertools
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from trainer_vs_peers import (
    BATCH_SIZE,
    BY_HAND,
    FLAT,
    GROUPED,
    OURS,
    OURS_GROUPED,
    OURS_PADDED,
    STRATEGIES,
    collate,
    collate_flat,
    make_data,
    of_model,
)
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainerCallback, TrainingArguments

from adaptive_batching import is_out_of_memory
from adaptive_batching._memory.meter import memory_meter
from adaptive_batching.transformers import AdaptiveArguments, adaptive

STOCK = "Trainer"
METHODS = [STOCK, GROUPED, OURS, FLAT, OURS_PADDED, OURS_GROUPED, "batch_rebalance"]  # the most telling first
SAME_STEPS = {FLAT: STOCK, OURS: STOCK, OURS_PADDED: STOCK, OURS_GROUPED: GROUPED}
STEPS, WARM_UP_STEPS, REPEATS = 20, 5, 4
LONGEST = {"cuda": 1024, "cpu": 128}
SIZES: dict[str, dict[str, Any]] = {
    "cuda": dict(
        vocab_size=16384, hidden_size=2048, intermediate_size=5632, num_hidden_layers=10, num_attention_heads=16,
        num_key_value_heads=8,
    ),
    "cpu": dict(
        vocab_size=2048, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    ),
}  # fmt: skip


def samples_of(device: str, num_samples: int) -> list[dict[str, Any]]:
    return make_data(num_samples, LONGEST[device], int(SIZES[device]["vocab_size"]), REPEATS)


def make_model(device: str) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES[device], max_position_embeddings=LONGEST[device], pad_token_id=0, use_cache=False)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")


def padded(samples: list[Any]) -> dict[str, torch.Tensor]:
    return of_model(collate(samples))


def end_to_end(samples: list[Any]) -> dict[str, torch.Tensor]:
    return of_model(collate_flat(samples))


def size_by_hand(model: Any, data: list[Any], device: str) -> int:
    """Return the samples of a forward of a person who knows what fits, next to a tenth of the memory."""
    if device == "cpu":
        return 8
    meter = memory_meter(device)
    longest = max(data, key=lambda sample: len(sample["input_ids"]))
    shortest = min(data, key=lambda sample: len(sample["input_ids"]))
    size = BATCH_SIZE
    while size > 1:
        failed = False
        try:
            batch = {key: value.to(device) for key, value in padded([*[longest] * (size - 1), shortest]).items()}
            with meter.limit(int(0.9 * meter.total_bytes)), torch.autocast(device, torch.bfloat16):
                model(**batch).loss.backward()
            meter.synchronize()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failed = True
        model.zero_grad()
        meter.release()
        if not failed:
            break
        size //= 2
    return size


class Counting(Trainer):
    """Counts tokens of each forward, without waiting for the device."""

    real: Any = 0
    padded_tokens = 0

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        tokens, mask = inputs["input_ids"], inputs.get("attention_mask")
        self.padded_tokens += tokens.numel()
        self.real = self.real + (tokens.numel() if mask is None or mask.dim() != 2 else mask.sum())
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        return loss


class Marks(TrainerCallback):
    """Notes time and tokens at the end of each step, and begins to watch memory with the first."""

    def __init__(self, device: str) -> None:
        self.trainer: Any = None
        self.began = 0.0
        self.of_steps: list[tuple[float, float, int]] = []  # time, real and padded tokens so far
        self._meter = memory_meter(device)
        self._waits = device == "cuda"

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.began:
            self._meter.release()
            self._meter.reset_peak()
            self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._waits:
            torch.cuda.synchronize()
        self.of_steps.append((time.perf_counter(), float(self.trainer.real), self.trainer.padded_tokens))

    def peak_bytes(self) -> int:
        return self._meter.peak_bytes()


def measure_trainer(method: str, device: str, data: list[Any], record: Path) -> dict[str, Any]:
    """Train an epoch in one way; the record of ``adaptive`` stays at ``record``."""
    model = make_model(device)
    size = size_by_hand(model, data, device) if method in BY_HAND else BATCH_SIZE
    while True:
        try:
            return _train(method, device, data, record, model, size)
        except Exception as error:
            if method != FLAT or size == 1 or not is_out_of_memory(error):
                raise
        size //= 2
        model = None
        memory_meter(device).release()
        model = make_model(device)


def _train(method: str, device: str, data: list[Any], record: Path, model: Any, size: int) -> dict[str, Any]:
    marks = Marks(device)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder, num_train_epochs=1, max_grad_norm=1.0, remove_unused_columns=False, logging_steps=1,
            save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=device == "cpu", bf16=device == "cuda",
            per_device_train_batch_size=size, gradient_accumulation_steps=BATCH_SIZE // size,
            train_sampling_strategy=STRATEGIES.get(method, "random"),
        )  # fmt: skip
        shared: dict[str, Any] = dict(
            model=model, args=args, train_dataset=data, callbacks=[marks],
            data_collator=end_to_end if method == FLAT else padded,
        )  # fmt: skip
        is_ours = method.startswith(OURS)
        if is_ours:
            settings = AdaptiveArguments(micro_batch_size="auto", padding=method == OURS_PADDED)
            trainer: Any = adaptive(Counting)(**shared, adaptive=settings)
        else:
            trainer = Counting(**shared)
        marks.trainer = trainer
        start = time.perf_counter()
        trainer.train()
        whole = time.perf_counter() - start
        peak = marks.peak_bytes()
        report, forwards = Path(folder) / "adaptive_batching" / "report.jsonl", []
        if method == OURS:
            shutil.copy(report, record)
        if is_ours:
            events = [json.loads(line) for line in report.read_text().splitlines()]
            forwards = [event["forwards"] for event in events if event["event"] == "step"]
    first, last = marks.of_steps[min(WARM_UP_STEPS, len(marks.of_steps) - 1) - 1], marks.of_steps[-1]
    late_ones = marks.of_steps[len(marks.of_steps) // 2 - 1 :]
    late = [after[0] - before[0] for before, after in itertools.pairwise(late_ones)]
    seconds, tokens, with_padding = (b - a for a, b in zip(first, last, strict=True))
    return {
        "in_a_forward": f"{trainer.adaptive.max_tokens} tokens" if is_ours else size,
        "tokens_per_second": round(tokens / seconds),
        "padded_over_real": round(with_padding / tokens, 3) if tokens else None,
        "forwards": " ".join(map(str, forwards)),
        "seconds_of_a_late_step": round(statistics.median(late), 3),
        "peak_mib": peak // 2**20,
        "set_up_seconds": round(marks.began - start, 1),
        "probe_seconds": round(trainer.adaptive.waited, 1) if is_ours else 0.0,
        "whole_seconds": round(whole, 1),
        "recoveries": trainer.adaptive.num_recoveries if is_ours else 0,
        "steps": len(marks.of_steps),
        "losses": [each["loss"] for each in trainer.state.log_history if "loss" in each],
    }  # fmt: skip


def with_differences(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return rows without their losses, but with how far these are from the other run with the same steps."""
    rows = {}
    for method, row in found.items():
        shown = {key: value for key, value in row.items() if key != "losses"}
        other = found.get(SAME_STEPS.get(method, ""), {}).get("losses")
        if "losses" in row:
            pairs = list(zip(row["losses"], other, strict=False)) if other else []
            apart = [abs(one - two) / (abs(two) or 1.0) for one, two in pairs]
            shown["loss_difference_at_first"] = f"{apart[0]:.0e}" if apart else ""
            shown["loss_difference"] = f"{max(apart):.0e}" if apart else ""
        rows[method] = shown
    return rows
