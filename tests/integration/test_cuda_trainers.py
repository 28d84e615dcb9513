"""Trainer and plain loops on a GPU: what runs out of memory there, and samples end to end, against Trainer's own steps.

``make test-cuda`` runs these. Each stands alone, so that what has run when time is up counts.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra transformers)")

from adaptive_batching import AdaptiveStep, _attention  # noqa: E402
from adaptive_batching.transformers import AdaptiveArguments  # noqa: E402
from tests.conftest import without_pages  # noqa: E402
from tests.transformers.trainers import assert_same, collate, logged, make_data, make_llama, make_trainer  # noqa: E402

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SIZES: dict[str, Any] = dict(
    vocab_size=8192, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
    initializer_range=0.05,
)  # fmt: skip
LONGEST = 512
BATCH = 32
ON_DEVICE: dict[str, Any] = dict(
    use_cpu=False, per_device_train_batch_size=BATCH, num_train_epochs=1, optim="sgd", learning_rate=0.03,
    warmup_steps=0, dataloader_pin_memory=False,
)  # fmt: skip
SURVIVES = AdaptiveArguments(micro_batch_size=BATCH)
"""The batch as it is, unless memory runs out"""


@pytest.fixture(autouse=True)
def alone_on_one_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trainer would spread a model over all devices; what an earlier test leaves in the cache is given back."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    tidy()
    with without_pages():
        yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def tidy() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def num_failures() -> int:
    """Return how often the device has been out of memory since the process started."""
    return int(torch.cuda.memory_stats().get("num_ooms", 0))


@contextlib.contextmanager
def at_most(more_bytes: float) -> Iterator[None]:
    """Have the process run out of memory beyond ``more_bytes`` on top of what it holds now."""
    tidy()
    allowed = torch.cuda.memory_allocated() + more_bytes
    torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.mem_get_info()[1])
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@dataclass
class Trained:
    """What a run has logged for each step, where its weights began and ended, on the host, and what it took."""

    steps: list[dict[str, Any]]
    began: dict[str, torch.Tensor]
    ended: dict[str, torch.Tensor]
    peak_bytes: int  # in use, on top of what was there before
    reserved_bytes: int
    num_failures: int  # of allocations


def on_host(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach().to("cpu", torch.float64, copy=True) for name, value in values.items()}


def watched(model: torch.nn.Module, run: Callable[[], list[dict[str, Any]]]) -> Trained:
    """Note what comes of a ``run`` that trains ``model``, on the device already, and returns what it has logged."""
    began = on_host(model.state_dict())
    tidy()
    before, reserved, failures = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), num_failures()
    steps = run()
    peaks = torch.cuda.max_memory_allocated() - before, torch.cuda.max_memory_reserved() - reserved
    return Trained(steps, began, on_host(model.state_dict()), *peaks, num_failures() - failures)


def train(trainer: Any) -> Trained:
    def run() -> list[dict[str, Any]]:
        trainer.train()
        return [each for each in logged(trainer) if "loss" in each]

    return watched(trainer.model, run)


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor] | None = None) -> float:
    squares = [(value if other is None else value - other[name]).square().sum() for name, value in one.items()]
    return float(torch.stack(squares).sum().sqrt())


@dataclass(frozen=True)
class Tolerance:
    """How far two runs may be apart, relative to the second."""

    loss: float = 1e-5
    gradient: float = 1e-4  # its norm
    weights: float = 1e-5
    moved: float = 1e-3  # weights, relative to all that they have moved


HALF = Tolerance(loss=2e-3, gradient=2e-2, weights=1e-3, moved=0.1)


def assert_alike(ours: Trained, theirs: Trained, tolerance: Tolerance) -> None:
    assert len(ours.steps) == len(theirs.steps) > 2
    for one, other in zip(ours.steps, theirs.steps, strict=True):
        for key, relative in (("loss", tolerance.loss), ("grad_norm", tolerance.gradient)):
            if key in other:
                assert one[key] == pytest.approx(other[key], rel=relative), (key, one, other)
    off, moved = distance(ours.ended, theirs.ended), distance(theirs.ended, theirs.began)
    assert off <= tolerance.weights * distance(theirs.ended), (off, moved)
    assert moved > 0 and off <= tolerance.moved * moved, (off, moved)


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        ({}, Tolerance()),
        ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}, Tolerance()),
        ({"bf16": True}, HALF),
    ],
    ids=["float32", "checkpointed", "bfloat16"],
)
def test_a_trainer_that_runs_out_of_memory_takes_the_steps_of_one_that_does_not(
    settings: dict[str, Any], tolerance: Tolerance, tmp_path: Path
) -> None:
    settings = {**ON_DEVICE, **settings, "data": make_data(5 * BATCH, LONGEST)}
    free = train(make_trainer(tmp_path / "free", model=make_llama(**SIZES), **settings))
    assert free.num_failures == 0
    trainer = make_trainer(tmp_path / "limited", SURVIVES, model=make_llama(**SIZES), **settings)
    with at_most(0.6 * free.peak_bytes):
        limited = train(trainer)
    assert trainer.adaptive.num_recoveries >= 1 and limited.num_failures >= 1
    assert_alike(limited, free, tolerance)


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped heads": ("Llama", dict(num_key_value_heads=2)),
    # Tokens see fewer than most samples have, which weights of this size make a difference of.
    "window": ("Mistral", dict(num_key_value_heads=2, sliding_window=16, initializer_range=0.1)),
}


def make_model(name: str) -> Any:
    family, settings = MODELS[name]
    config = getattr(transformers, f"{family}Config")(pad_token_id=0, **{**SIZES, **settings})
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config)


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        ("grouped heads", "bf16"), ("grouped heads", "float32"), ("window", "bf16"), ("window", "float32"),
        ("grouped heads", "fp16"),
    ],
)  # fmt: skip
def test_rows_without_padding_take_the_steps_of_trainers_padded_batch(
    model: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once, one_by_one = [], []
    real, piecewise = _attention._attend_at_once, _attention.sample_by_sample

    def counted_at_once(*args: Any, **kwargs: Any) -> torch.Tensor:
        output = real(*args, **kwargs)
        at_once.append(output.dtype)
        return output

    def counted_one_by_one(bounds: Any, *tensors: torch.Tensor) -> Any:
        one_by_one.append(tensors[0].dtype)
        return piecewise(bounds, *tensors)

    monkeypatch.setattr(_attention, "_attend_at_once", counted_at_once)
    monkeypatch.setattr(_attention, "sample_by_sample", counted_one_by_one)
    settings = {**ON_DEVICE, "data": make_data(5 * BATCH, LONGEST // 4)}
    if dtype != "float32":
        settings[dtype] = True
    padded = train(make_trainer(tmp_path / "padded", model=make_model(model), **settings))
    assert not at_once and not one_by_one
    ours = AdaptiveArguments(micro_batch_size="auto", memory_limit="8GiB")
    trainer = make_trainer(tmp_path / "rows", ours, model=make_model(model), **settings)
    rows = train(trainer)
    assert trainer.adaptive.step.in_rows
    assert {each["padding"] for each in rows.steps} == {1.0}
    assert_alike(rows, padded, Tolerance() if dtype == "float32" else HALF)
    if dtype == "float32":
        assert set(one_by_one) == {torch.float32} and not at_once
        return
    half = torch.bfloat16 if dtype == "bf16" else torch.float16
    assert half not in one_by_one, "checks before training alone compute in float32"
    assert at_once.count(half) >= len(rows.steps) * SIZES["num_hidden_layers"]


def token_losses(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    labels = batch["labels"][:, 1:].flatten()
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]  # [b, s, v]
    return cross_entropy(logits.flatten(0, 1), labels, reduction="sum"), labels.ne(-100).sum()


def test_a_plain_loop_that_runs_out_of_memory_takes_the_steps_of_one_that_does_not() -> None:
    data = make_data(5 * BATCH, LONGEST)
    batches = [data[start : start + BATCH] for start in range(0, len(data), BATCH)]

    def free(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
        for samples in batches:
            loss, number = token_losses(model, {name: rows.cuda() for name, rows in collate(samples).items()})
            (loss / number).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.detach() / number

    def limited(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
        step: Any = AdaptiveStep(model, optimizer, token_losses, collate, length=lambda each: len(each["input_ids"]))
        yield from map(step, batches)
        assert step.num_recoveries >= 1

    def run(loop: Any, most_bytes: float) -> Trained:
        model = make_llama(**SIZES).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.03)
        with at_most(most_bytes):
            return watched(model, lambda: [{"loss": float(loss)} for loss in loop(model, optimizer)])

    theirs = run(free, torch.cuda.mem_get_info()[0] / 2)
    ours = run(limited, 0.6 * theirs.peak_bytes)
    assert theirs.num_failures == 0 and ours.num_failures >= 1
    assert_alike(ours, theirs, Tolerance())


class Takes(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Takes memory of the device after the second step."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes, self.taken = num_bytes, torch.empty(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            self.taken = torch.empty(self._num_bytes, dtype=torch.uint8, device="cuda")


def test_memory_that_something_else_takes_in_the_middle_of_training_changes_no_step(tmp_path: Path) -> None:
    settings = {**ON_DEVICE, "data": make_data(6 * BATCH, LONGEST)}
    free = train(make_trainer(tmp_path / "free", model=make_llama(**SIZES), **settings))
    room = free.reserved_bytes + 2**26
    takes = Takes(room - int(0.6 * free.peak_bytes))
    trainer = make_trainer(tmp_path / "less", SURVIVES, model=make_llama(**SIZES), callbacks=[takes], **settings)
    with at_most(room):
        less = train(trainer)
    assert takes.taken.is_cuda
    retries = [each["oom_retries"] for each in less.steps]
    assert retries[:2] == [0, 0] and retries[-1] >= 1 and less.num_failures >= 1
    assert_alike(less, free, Tolerance())


class FirstStep(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Notes when training begins, after all that the probe has run."""

    num_failures = -1

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            self.num_failures = num_failures()
            torch.cuda.reset_peak_memory_stats()


def test_the_largest_batch_fills_the_limit_and_trains_without_running_out_of_memory(tmp_path: Path) -> None:
    row = [1 + token % 90 for token in range(LONGEST)]
    data = [{"input_ids": row, "labels": row}] * 512
    ours = AdaptiveArguments(use_maximum_batch_size=True, memory_limit="4GiB", round_to_power_of_two=False)
    first = FirstStep()
    settings = {**ON_DEVICE, "optim": "adamw_torch", "per_device_train_batch_size": 4}
    trainer = make_trainer(tmp_path, ours, model=make_llama(**SIZES), data=data, callbacks=[first], **settings)
    trainer.train()
    probe = trainer.adaptive.probe
    assert probe.reason == "memory" and probe.batch_size > 4
    assert trainer.state.global_step == -(-len(data) // probe.batch_size)
    assert trainer.adaptive.num_recoveries == 0 and num_failures() == first.num_failures
    reserved = torch.cuda.max_memory_reserved()
    assert 0.8 * probe.budget_bytes <= reserved <= probe.budget_bytes, (reserved, probe)


@pytest.mark.parametrize("settings", [{}, {"bf16": True}, {"gradient_accumulation_steps": 2}], ids=str)
def test_with_none_set_training_on_the_device_is_trainers_own_bit_for_bit(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    settings = {**ON_DEVICE, **settings, "optim": "adamw_torch", "data": make_data(6 * BATCH, LONGEST // 4)}
    runs = {"stock": None, "again": None, "off": AdaptiveArguments()}
    with sdpa_kernel(SDPBackend.MATH):  # whose backward pass is deterministic
        stock, again, off = (
            make_trainer(tmp_path / name, ours, model=make_llama(**SIZES), **settings) for name, ours in runs.items()
        )
        for trainer in (stock, again, off):
            trainer.train()
    assert_same(again, stock)
    assert off.adaptive is None
    assert_same(off, stock)


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torchs_kernel_for_rows_attends_as_samples_do_one_by_one_in_float32(
    dtype: torch.dtype, kv_heads: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that of a torch whose kernel has no argument that says that heads are grouped: does it take them?"""
    varlen = pytest.importorskip("torch.nn.attention.varlen").varlen_attn

    def kernel(*args: Any, enable_gqa: bool = False, **kwargs: Any) -> torch.Tensor:
        knows = "enable_gqa" in inspect.signature(varlen).parameters
        return varlen(*args, **kwargs, **({"enable_gqa": enable_gqa} if knows else {}))

    bounds = _attention.SampleBounds([5, 128, 1, 77, 16, 17])
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(1, heads, bounds.tokens, 32) for heads in (8, kv_heads, kv_heads, 8)]
    *inputs, towards = (torch.randn(shape, device="cuda", generator=generator).to(dtype) for shape in shapes)

    def attended(dtype: torch.dtype) -> list[torch.Tensor]:
        given = [each.to(dtype).requires_grad_() for each in inputs]
        output = _attention.attend_within_samples(*given, bounds, window=window)
        return [output, *torch.autograd.grad(output, given, towards.to(dtype))]

    expected = attended(torch.float32)
    monkeypatch.setattr(_attention, "_fused", lambda query, value: kernel)
    for name, ours, theirs in zip(("output", "query", "key", "value"), attended(dtype), expected, strict=True):
        assert theirs.norm() > 0
        assert (ours.float() - theirs).norm() <= 1e-2 * theirs.norm(), name
