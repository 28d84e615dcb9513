"""Cases of a plain loop on two processes, with DDP and FSDP2."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from adaptive_batching import AdaptiveBatchingConfig, AdaptiveStep
from adaptive_batching._ranks import fsdp
from adaptive_batching._ranks.agree import Ranks
from adaptive_batching._ranks.gradient_sum import GradientSum
from tests.loop.test_step import Centred, Model, collate, length, loss, texts

RANK = int(os.environ.get("RANK", 0))
CLIP = 0.5
KINDS = ("ddp", "fsdp2")
BATCHES = [
    [texts(9, 2, 30, 5, 12), texts(12, 7, 3, 21, 8, 8, 25)],
    [texts(4), texts(11, 6)],
    [texts(9, 17, 5, 12), []],
    [texts(30, 5, 12, 2), texts(12, 29, 20)],
]
"""Samples of each step, for each rank."""

FAULTS = ["none", "in parts", "forward on both", "backward on one"]
OF_SUMS = ["sum on one"]  # with DDP alone


class Faulty(Model):
    """Runs out of memory in forward or backward, and has parameters that a token alone needs, or none."""

    def __init__(self, where: str = "none", norm: nn.Module | None = None) -> None:
        super().__init__(norm=norm)
        self.where = where
        self.sometimes, self.never = (nn.Parameter(torch.ones(20)) for _ in range(2))
        self.rare_token = 7
        self.seen = nn.Buffer(torch.zeros(()))

    def use_every_parameter(self) -> None:
        """Have none that is used in some forwards only, as FSDP2 cannot reduce its gradient."""
        self.rare_token = -1
        del self.sometimes, self.never

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        most, self.book.most_tokens = self.book.most_tokens, self.book.most_tokens if self.where == "forward" else 10**9
        try:
            logits = super().forward(tokens)
        finally:
            self.book.most_tokens = most
        self.seen.add_(tokens.numel())
        is_rare = tokens == self.rare_token
        if self.rare_token >= 0 and is_rare.any():
            logits = torch.where(is_rare[..., None], logits * self.sometimes, logits)
        if self.where == "backward" and tokens.numel() > most and torch.is_grad_enabled():
            logits.register_hook(run_out)
        return logits


def run_out(gradient: torch.Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def make_model(where: str = "none", norm: nn.Module | None = None) -> Faulty:
    torch.manual_seed(0)
    return Faulty(where, norm).double()


def wrapped(kind: str, model: Faulty, **options: Any) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model, **options)
    model.use_every_parameter()
    for layer in (model.embedding, model.out):
        fully_shard(layer, **options)
    return sharded(model, **options)


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    fully_shard(model, **options)
    return model


def make_step(
    kind: str, model: Faulty, loss: Callable[..., Any] = loss, max_tokens: int | None = None, **settings: Any
) -> tuple[nn.Module, AdaptiveStep[Any]]:
    prepared = wrapped(kind, model)
    optimizer = torch.optim.AdamW(prepared.parameters(), lr=0.01)
    given: dict[str, Any] = {"collate": collate, "length": length, "max_grad_norm": CLIP, **settings}
    step: AdaptiveStep[Any] = AdaptiveStep(prepared, optimizer, loss, **given)
    step.max_tokens = max_tokens
    return prepared, step


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    return [whole(parameter.detach()).clone() for parameter in model.parameters()]


def train(kind: str, fault: str) -> dict[str, Any]:
    where, _, who = fault.partition(" on ")
    model = make_model(where)
    prepared, step = make_step(kind, model, max_tokens=64 if fault == "in parts" else None)
    losses = []
    with failing_sums(where == "sum" and (RANK == 1 or who == "both")):
        for batch in BATCHES:
            losses.append(step(batch[RANK]).item())
            if RANK == 1 or who == "both":
                model.book.most_tokens = 64
            with torch.no_grad():  # an evaluation in between changes nothing
                prepared(collate(texts(5))["tokens"])
    return {
        "losses": losses, "weights": weights_of(prepared), "recoveries": step.num_recoveries,
        "forwards": model.forwards, "seen": model.seen,
    }  # fmt: skip


@contextmanager
def failing_sums(fails: bool) -> Iterator[None]:
    """Run out of memory where the second sum of gradients is prepared."""
    prepare, calls = GradientSum.prepare, []

    def prepare_or_fail(self: GradientSum) -> None:
        calls.append(self)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        prepare(self)

    with mock.patch.object(GradientSum, "prepare", prepare_or_fail if fails else prepare):
        yield


class Totals:
    """A loss that counts the samples of its batches, which is its state."""

    def __init__(self) -> None:
        self.samples = 0

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        self.samples += len(batch["labels"])
        return loss(model, batch)

    def state_dict(self) -> dict[str, int]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.samples = state["samples"]


def totals(kind: str) -> list[int]:
    """The samples that a loss has counted after a probe, and after a step."""
    counted = Totals()
    _, step = make_step(kind, make_model(), counted, state=[counted])
    step.find_maximum_batch_size(texts(30)[0], upper=2)
    found = [counted.samples]
    step(BATCHES[0][RANK])
    return [*found, counted.samples]


def gradients(kind: str) -> dict[str, Any]:
    """Gradients for a step of one's own, which is not taken, and then another one."""
    prepared, step = make_step(kind, make_model())
    found = step.gradients(BATCHES[0][RANK]).item()
    gathered = [None if each.grad is None else whole(each.grad).clone() for each in prepared.parameters()]
    prepared.zero_grad()
    return {"loss": found, "gradients": gathered, "again": step(BATCHES[0][RANK]).item()}


def probe(kind: str) -> dict[str, Any]:
    """Look for the largest size where the second rank has room for three samples, and then where it has fewer."""
    model = make_model("forward")
    prepared, step = make_step(kind, model)
    before = weights_of(prepared)
    exact = AdaptiveBatchingConfig(round_to_power_of_two=False)
    found = []
    for most_tokens, in_parts in ((100, False), (100, True), (10**9, False)):
        model.book.most_tokens = most_tokens if RANK == 1 else 10**9
        upper = 40 - 20 * RANK
        found.append(step.find_maximum_batch_size(texts(30)[0], upper=upper, in_parts=in_parts, settings=exact))
    same = all(torch.equal(a, b) for a, b in zip(before, weights_of(prepared), strict=True))
    return {"found": [each.batch_size for each in found], "search": [each.search for each in found], "same": same}


def mean_on_one(model: nn.Module, batch: Any) -> Any:
    total, number = loss(model, batch)
    return total / number if RANK == 1 and total.requires_grad and len(batch["labels"]) > 2 else (total, number)


def wrong_in_backward(model: nn.Module, batch: Any) -> Any:
    def fail(gradient: torch.Tensor) -> None:
        raise KeyError("labels")

    total, number = loss(model, batch)
    if RANK == 1 and total.requires_grad and len(batch["labels"]) > 2:
        total.register_hook(fail)
    return total, number


def gathering(model: nn.Module, batch: Any) -> Any:
    """A mean over the targets of all ranks, as each forward finds them."""
    total, number = loss(model, batch)
    dist.all_reduce(number)
    return total, number


def wrong_in_collate(samples: list[Any]) -> Any:
    """Fails on one rank."""
    if RANK == 1:
        raise KeyError("labels")
    return collate(samples)


def mistakes(kind: str) -> dict[str, Any]:
    """Errors of one rank and of both, after each of which the ranks still agree."""
    batch = BATCHES[0][RANK]
    wrong_on_one: Any = collate(batch) if RANK == 1 else batch
    found = {
        "mean": error_of(lambda: make_step(kind, make_model(), mean_on_one)[1](batch)),
        "backward": error_of(lambda: make_step(kind, make_model(), wrong_in_backward)[1](batch)),
        "gathering": error_of(lambda: make_step(kind, make_model(), gathering)[1](batch)),
        "gathering in a probe": error_of(
            lambda: make_step(kind, make_model(), gathering)[1].find_maximum_batch_size(batch[0], upper=2)
        ),
        "collated": error_of(lambda: make_step(kind, make_model())[1](wrong_on_one)),
        "collating": error_of(lambda: make_step(kind, make_model(), collate=wrong_in_collate)[1](batch)),
        "balanced": error_of(lambda: make_step(kind, make_model(), balance_ranks=RANK == 0)[1](batch)),
        "long": error_of(lambda: train_with(kind, make_model("forward"), 20 if RANK == 1 else 10**9)),
    }
    model = make_model(norm=nn.BatchNorm1d(16))
    few = batch if RANK == 1 else batch[:1]
    found["batch norm"] = error_of(lambda: make_step(kind, model, max_tokens=32, balance_ranks=False)[1](few))
    for max_tokens in (64, None):
        model = make_model("forward", Centred())
        found[f"Centred, {max_tokens}"] = error_of(partial(train_with, kind, model, 64, max_tokens))
    return found


def train_with(kind: str, model: Faulty, most_tokens: int, max_tokens: int | None = None) -> None:
    _, step = make_step(kind, model, max_tokens=max_tokens)
    model.book.most_tokens = most_tokens
    step(BATCHES[0][RANK])


def told() -> list[list[str]]:
    """Tell the other rank as little as goes in one collective, and more than that on one of them or both."""
    ranks = Ranks()
    return [ranks.gather("x" * sizes[RANK]) for sizes in ((1, 10), (1, 5000), (5000, 6000))]


def error_of(function: Callable[[], object]) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refusals() -> dict[str, str]:
    def of(make: Callable[[], nn.Module], more: Callable[[], list[nn.Parameter]] = list) -> str:
        return error_of(lambda: step_of(make(), more))

    def step_of(model: nn.Module, more: Callable[[], list[nn.Parameter]] = list) -> AdaptiveStep[Any]:
        return AdaptiveStep(model, torch.optim.SGD([*model.parameters(), *more()], lr=0.1), loss, collate)

    alone = [dist.new_group([rank]) for rank in range(2)][RANK]
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    found = {
        "plain": of(make_model),
        "fsdp1": of(lambda: FullyShardedDataParallel(make_model(), device_id=torch.device("cpu"))),
        "static": of(lambda: wrapped("ddp", make_model(), static_graph=True)),
        "group": of(lambda: wrapped("ddp", make_model(), process_group=alone)),
        "hsdp": of(lambda: wrapped("fsdp2", make_model(), mesh=mesh)),
        "layers": of(lambda: nn.Sequential(sharded(nn.Linear(2, 2)), nn.Linear(2, 2))),
        "factor": of(with_factor),
        "of the loss": of(lambda: wrapped("fsdp2", make_model()), lambda: [nn.Parameter(torch.ones(2))]),
    }
    model = wrapped("ddp", make_model())
    model.add_module("norm", nn.SyncBatchNorm(2))
    with mock.patch.object(fsdp, "_AllGatherBase", object):
        found["old torch"] = of(lambda: wrapped("fsdp2", make_model()))
    with mock.patch.object(dist, "is_initialized", return_value=False):
        early = step_of(make_model())
    return {**found, "sync batch norm": of(lambda: model), "before the group": error_of(lambda: early(BATCHES[0][0]))}


def with_factor() -> nn.Module:
    model = make_model()
    prepared = wrapped("fsdp2", model)
    assert isinstance(model.out, FSDPModule)
    model.out.set_gradient_divide_factor(1.0)
    return prepared


def in_a_collective() -> str:
    """Return the error where memory runs out among the sums of gradients, which ends a rank, and so the other."""
    _, step = make_step("ddp", make_model())
    step(BATCHES[0][RANK])

    def fail(tensor: torch.Tensor, **options: Any) -> None:
        if tensor.numel() > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        all_reduce(tensor, **options)

    all_reduce = dist.all_reduce
    with mock.patch.object(dist, "all_reduce", fail if RANK == 1 else all_reduce):
        return error_of(partial(step, BATCHES[0][RANK]))


CASES: dict[str, Callable[[], Any]] = {
    **{f"{kind}, {fault}": partial(train, kind, fault) for kind in KINDS for fault in FAULTS},
    **{f"ddp, {fault}": partial(train, "ddp", fault) for fault in OF_SUMS},
    **{f"{kind}, gradients": partial(gradients, kind) for kind in KINDS},
    **{f"{kind}, totals": partial(totals, kind) for kind in KINDS},
    **{f"{kind}, probe": partial(probe, kind) for kind in KINDS},
    **{f"{kind}, mistakes": partial(mistakes, kind) for kind in KINDS},
    "refusals": refusals,
    "told": told,
    "in a collective": in_a_collective,  # the last, as ranks do not agree any more
}
