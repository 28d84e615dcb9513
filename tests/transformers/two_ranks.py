"""Trains on two processes with DDP and FSDP2, with trainers of others and ours.

A run is the devices' strategy, our settings, and what is trained: ``fsdp short sft``.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch.distributed.tensor import DTensor

from adaptive_batching import ConfigError, _state
from adaptive_batching._ranks import fsdp
from adaptive_batching._transformers.handed_out import StepInputs
from adaptive_batching._transformers.step_in_parts import ForwardBackward, StepInParts
from adaptive_batching.transformers import AdaptiveArguments
from tests.conftest import without_pages
from tests.loop.shared_steps import told
from tests.transformers import architectures, strangers, trainers
from tests.transformers.test_streams import Stream

RANK = int(os.environ.get("RANK", 0))
SAMPLES = 64  # two steps of two batches of 8 on each of two ranks


def of_this_rank(epoch: int, current_batch_size: int) -> int:
    """An increase function that says something else on each rank, as one that reads free memory does."""
    return 8 * (1 + RANK) * epoch


OURS = {
    "stock": None,
    "off": AdaptiveArguments(),
    "parts": AdaptiveArguments(micro_batch_size=3),
    "short": AdaptiveArguments(micro_batch_size=8),
    **dict.fromkeys(("probed", "rows", "auto", "shared"), AdaptiveArguments(micro_batch_size="auto")),
    "drawn": AdaptiveArguments(micro_batch_size="auto", balance_ranks=False),
    "maximum": AdaptiveArguments(use_maximum_batch_size=True, search="binary_search"),
    "growing": AdaptiveArguments(batch_increase_function=trainers.DOUBLE, micro_batch_size=6, max_batch_size=32),
    "asked": AdaptiveArguments(batch_increase_function=of_this_rank, micro_batch_size=6, max_batch_size=32),
}
"""Settings of a run by its name; other names are those of places."""

PLACES = {"recompute": ["recompute"], "places": ["head", "gather", "reduce"]}
"""Where memory runs out, once in each step after the first: in a layer, or when a collective is issued."""

SAVED_AT = {"growing": 5, "parts": 1}
"""Step of a checkpoint, of the runs that save one."""

GROWING = {"gradient_accumulation_steps": 1, "num_train_epochs": 3}
SHORT = {"max_grad_norm": 0.3, "num_train_epochs": 1, "warmup_steps": 0}


LLAMAS: dict[str, dict[str, Any]] = {
    "llama": {},
    "early": {},
    "twice": {"num_train_epochs": 2},
    "counted": {"include_num_input_tokens_seen": "non_padding", "num_train_epochs": 2},
    "apart": {"average_tokens_across_devices": False},
    "rebalanced": {"train_sampling_strategy": "batch_rebalance"},
    "checkpointed": {"gradient_checkpointing": True},
    "float16": {"fp16": True},
    "compiled": {"torch_compile": True, "torch_compile_backend": "eager"},
    "bert": {"gradient_accumulation_steps": 1},  # of whose means Trainer would make a sum
    "stream": {"max_steps": 3, "accelerator_config": {"dispatch_batches": False}},
}
"""Settings of trainers, by the name of what is trained."""

OF_TRL = {"sft": "SFT", "dpo": "DPO"}
"""Kind of a trainer of TRL, by the name of what is trained."""


SHARED = ["counted", "uneven", "bert", "apart"]
"""Runs with samples shared out among ranks, each compared with the same run as drawn."""


class ShortOnOneRank(trainers.OutOfMemory):
    """Memory is short on the second rank alone."""

    def _check(self, model: Any, args: Any, kwargs: Any) -> None:
        if RANK == 1:
            super()._check(model, args, kwargs)


class ShortLater(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Memory is short on the second rank from the second step on."""

    def __init__(self, model: Any) -> None:
        self._short = ShortOnOneRank(model, 10**9)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._short.most_tokens = 60


class Once(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Runs out of memory on the second rank, once, at the third time that it passes a place after a step."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._fails: Iterator[bool] = iter(())  # which stays where it is when a step puts back what it changes

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if RANK == 1 and state.global_step == self._step:
            self._fails = iter((False, False, True))

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if not _state.rehearsing and next(self._fails, False):
            raise torch.OutOfMemoryError("CUDA out of memory")


def fail_early(model: Any) -> None:
    """Run out of memory on the second rank in the second forward, which is that of a check of all ranks."""
    fails = iter([False, RANK == 1])

    def hook(*_: Any) -> None:
        if next(fails, False):
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.register_forward_pre_hook(hook)


@contextlib.contextmanager
def failing_once(trainer: Any, places: Sequence[str]) -> Iterator[None]:
    """Run out of memory inside, once at each of ``places`` of a sharded model, and in a step each."""
    once, check_room = {place: Once(step) for step, place in enumerate(places, 1)}, fsdp._check_room

    def in_collective(output: torch.Tensor, given: torch.Tensor) -> None:
        once.get("gather" if output.numel() > given.numel() else "reduce", str)()
        check_room(output, given)

    def in_recompute(*_: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            once["recompute"]()

    if "recompute" in once:
        trainer.model.model.layers[1].mlp.register_forward_pre_hook(in_recompute)
    if "head" in once:  # its norm has run, with which it is gathered
        trainer.model.lm_head.register_forward_hook(once["head"])
    for each in once.values():
        trainer.add_callback(each)
    with mock.patch.object(fsdp, "_check_room", in_collective):
        yield


@contextlib.contextmanager
def noting_warnings(found: dict[str, Any]) -> Iterator[None]:
    found["warned"] = []
    log, handler = logging.getLogger("adaptive_batching"), logging.Handler("WARNING")
    handler.emit = lambda record: found["warned"].append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


@contextlib.contextmanager
def uneven_steps() -> Iterator[None]:
    """Have one sample of each rank ignored in the first step, and three of the second rank left out in the second."""
    stock = StepInParts.__call__

    def call(self: StepInParts, inputs: StepInputs, forward_backward: ForwardBackward) -> torch.Tensor:
        first, *others = inputs.batches
        if self.trainer.state.global_step == 0:
            first = [{**first[0], "label": -100}, *first[1:]]
        elif RANK == 1:
            first = first[3:]
        inputs.batches = [first, *others]
        return stock(self, inputs, forward_backward)

    with mock.patch.object(StepInParts, "__call__", call):
        yield


@contextlib.contextmanager
def sharding_on_hosts() -> Iterator[None]:
    """Have Accelerate shard a model on CPUs, where it would take DDP."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    stock = AcceleratorState.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        if options.get("fsdp_plugin") is not None:
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        stock(self, *args, **options)

    AcceleratorState.__init__ = init
    try:
        yield
    finally:
        AcceleratorState.__init__ = stock


def make(name: str, folder: Path, **more: Any) -> Any:
    """Return the trainer of a run."""
    strategy, ours, model = name.split()
    grows = GROWING if ours in ("growing", "asked") else {}
    settings: dict[str, Any] = {**SHORT, **grows, "ddp_backend": "gloo", **more}
    settings |= {"fsdp": True} if strategy == "fsdp" else {}
    arguments = OURS.get(ours, AdaptiveArguments(micro_batch_size=3))
    torch.manual_seed(0)
    if model in OF_TRL:
        return of_trl(model, folder, arguments, settings)
    made = {
        **dict.fromkeys(("labelled", "uneven"), trainers.make_classes), "bert": trainers.make_bert,
        "compiled": trainers.make_bigrams,
        "bloom": lambda: architectures.make("Bloom"),
    }  # fmt: skip
    of_labels = model in ("labelled", "uneven")
    data: dict[str, Any] = {"stream": Stream, **dict.fromkeys(("labelled", "uneven"), trainers.make_labelled)}
    return trainers.make_trainer(
        folder, arguments, model=made.get(model, trainers.make_llama)(),
        data=data.get(model, trainers.make_data)(SAMPLES),
        collator=trainers.collate_labelled if of_labels else trainers.collate,
        **{"gradient_accumulation_steps": 2, **settings, **LLAMAS.get(model, {})},
    )  # fmt: skip


def of_trl(model: str, folder: Path, ours: AdaptiveArguments | None, settings: dict[str, Any]) -> Any:
    from tests.transformers import test_trl

    test_trl.chance.seed(1)
    return test_trl.make(OF_TRL[model], folder, test_trl.make_tokenizer(), ours, **settings)


def run(name: str, folder: Path) -> dict[str, Any]:
    strategy, ours, model = name.split()
    folder = folder / name.replace(" ", "_")
    if ours == "evaluated":
        return evaluated(folder)
    if ours == "refused":
        return refused(model, folder)
    saves = {"save_strategy": "steps", "save_steps": SAVED_AT[ours]} if ours in SAVED_AT else {}
    found: dict[str, Any] = {"told": []}
    with sharding_on_hosts() if strategy == "fsdp" else contextlib.nullcontext(), told(found["told"]):
        trainer = make(name, folder, **saves)
        if ours in ("rows", "shared", "drawn"):
            trainers.without_probe(trainer, 90)
        watched = trainers.OutOfMemory(trainer.model, 10**9)
        if ours in ("short", "maximum", "rows"):
            ShortOnOneRank(trainer.model, 130 if model in OF_TRL else 60)
        if model == "early":
            fail_early(trainer.model)
        if model == "late":
            trainer.add_callback(ShortLater(trainer.model))
        how = failing_once(trainer, PLACES[ours]) if ours in PLACES else contextlib.nullcontext()
        how = uneven_steps() if model == "uneven" else how
        with noting_warnings(found) if ours == "probed" and strategy == "fsdp" else how:
            trainer.train()
        found |= outcome(trainer) | {"forwards": len(watched.forwards)}
        if model == "compiled":
            found["compiled"] = torch._dynamo.utils.counters["frames"]["ok"]
        if ours == "growing":
            resumed = make(name, folder / "resumed")
            resumed.train(str(folder / "checkpoint-5"))
            found["resumed"] = outcome(resumed)
    return found


def refused(name: str, folder: Path) -> dict[str, Any]:
    """Return why a script is not trained: its loss needs other ranks, or one rank reads a stream for all."""
    settings: dict[str, Any] = {"data": trainers.make_data(SAMPLES), "ddp_backend": "gloo"}
    if name == "stream":
        with pytest.raises(ConfigError) as caught:
            trainers.make_trainer(folder, OURS["parts"], **settings | {"data": Stream(SAMPLES), "max_steps": 1})
        return {"refusal": str(caught.value)}
    with pytest.raises(ConfigError) as caught:
        strangers.ON_TWO_RANKS[name](folder, OURS["parts"], **settings).train()
    return {"refusal": str(caught.value)}


def evaluated(folder: Path) -> dict[str, Any]:
    """Return what Trainer and ours give for samples that are no whole number of batches, and ours in short memory."""
    found: dict[str, Any] = {}
    for name, ours in {"stock": None, "ours": OURS["probed"], "short": OURS["short"]}.items():
        trainer = trainers.make_trainer(folder, ours, per_device_eval_batch_size=6, ddp_backend="gloo")
        short = ShortOnOneRank(trainer.model, 60 if name == "short" else 10**9, in_training=False)
        predicted = trainer.predict(trainers.make_data(21))
        found[name] = {
            "metrics": {key: value for key, value in predicted.metrics.items() if key == "test_loss"},
            "predicted": predicted.predictions.argmax(-1).tolist(), "labels": predicted.label_ids.tolist(),
            "failures": short.failures,
        }  # fmt: skip
    return found


def outcome(trainer: Any) -> dict[str, Any]:
    """Return what a trainer has logged, its weights in numbers, and what ours has found."""
    values = [
        value.full_tensor() if isinstance(value, DTensor) else value for value in trainer.model.state_dict().values()
    ]
    digest = hashlib.sha256(b"".join(value.float().numpy().tobytes() for value in values)).hexdigest()
    sums = [float(value.double().abs().sum()) for value in values]
    found = {"logged": trainers.logged(trainer), "weights": sums, "digest": digest}
    run = getattr(trainer, "adaptive", None)
    if run is not None:
        found["recoveries"] = run.num_recoveries
        found["in_rows"] = run.step is not None and run.step.in_rows
        found["probed"] = None if run.probe is None else run.probe.batch_size
        found["search"] = None if run.probe is None else run.probe.search
    return found


DDP = [
    "parts early", "short llama", "probed llama", "rows llama", "evaluated llama",
    "shared late", "shared labelled", "shared rebalanced", "asked llama", "short compiled",
    *(f"{ours} {model}" for model in SHARED for ours in ("shared", "drawn")),
    "stock bert", "short stream", "shared stream", "refused stream",
]  # fmt: skip
FSDP = [
    "stock llama", "off llama", "maximum llama", "growing llama", "places twice", "rows checkpointed", "auto bloom",
    "recompute checkpointed", "short float16", "shared counted", "shared late",
]  # fmt: skip


def runs() -> list[str]:
    ddp, fsdp = DDP, FSDP
    if importlib.util.find_spec("trl") is not None:
        ddp = [*ddp, "stock sft", "short sft", "stock dpo", "shared sft"]
        fsdp = [*fsdp, "probed sft", "short dpo", "shared dpo"]
    refused = strangers.ON_TWO_RANKS  # last, as these might wait for each other
    return [
        *(f"ddp {name}" for name in ddp), *(f"fsdp {name}" for name in fsdp),
        *(f"ddp refused {name}" for name in refused),
    ]  # fmt: skip


def run_all(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """Return what became of runs on this rank."""
    with without_pages():
        return {name: run(name, folder) for name in names}
