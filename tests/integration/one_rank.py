"""A sharded model on one rank, recovery armed as on many, with errors injected.

FSDP2 issues no collective where it is alone, and torchtune does not even shard there. What runs here is the rest: its
reset after a broken-off iteration, on the device's streams, and the calls that draining consists of.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtune.models.llama2 import llama2

from adaptive_batching._ranks.agree import Ranks
from adaptive_batching._ranks.fsdp import MicroBatchCollectives, _Collective, _Room
from adaptive_batching._unused_memory import release_cached_memory
from tests.support.toy_work import run_parts

SIZES = dict(vocab_size=64, num_layers=4, num_heads=2, num_kv_heads=2, embed_dim=32, max_seq_len=16)


def train(device: torch.device, breaks: Callable[[nn.Module], Callable[[], None]] | None) -> list[torch.Tensor]:
    """Weights after four steps of two micro-batches each; ``breaks`` arms a model and gives what disarms it."""
    torch.manual_seed(0)
    model = llama2(**SIZES).to(device)
    mesh = init_device_mesh(device.type, (1,))  # without one, FSDP2 takes a GPU where there is one
    for layer in [*model.layers, model.tok_embeddings, model.output]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    collectives = MicroBatchCollectives([model])
    tokens = torch.randint(1, 64, (4, 2, 4, 16), device=device)  # [steps, micro-batches, b, s]

    def forward_backward(batch: torch.Tensor) -> None:
        nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten()).backward()

    def discard() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        release_cached_memory(device)

    def run(batches: torch.Tensor) -> bool:
        parts = [partial(forward_backward, batch) for batch in batches]
        return not run_parts(parts, Ranks(device), collectives, discard).failed

    assert run(tokens[0][:1])  # to be recorded
    discard()
    for number, batches in enumerate(tokens):
        disarm = breaks(model) if breaks is not None and number == 1 else None
        if disarm is not None:
            assert not run(batches)
            disarm()
        assert run(batches)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.full_tensor().detach().clone() for parameter in model.parameters()]


def arm(layer: int, call: int, in_backward: bool, model: Any) -> Callable[[], None]:
    """Have the ``call``-th forward of a layer fail, or its backward; return what disarms it."""
    left = [call]

    def run_out(gradient: object = None) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise torch.OutOfMemoryError("injected")

    def after_forward(module: nn.Module, args: object, output: torch.Tensor) -> None:
        output.register_hook(run_out) if in_backward else run_out()

    return model.layers[layer].register_forward_hook(after_forward).remove  # type: ignore[no-any-return]


def differences_on(name: str) -> dict[str, float]:
    """Return the largest difference of any weight to undisturbed training, for each injected error."""
    device = torch.device(name)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    undisturbed = train(device, None)
    differences = {}
    for in_backward in (False, True):
        for layer, call in [(0, 1), (1, 2), (3, 2)]:
            weights = train(device, partial(arm, layer, call, in_backward))
            worst = max(float((a - b).abs().max()) for a, b in zip(weights, undisturbed, strict=True))
            differences[f"in {'backward' if in_backward else 'forward'}, layer {layer}, micro-batch {call}"] = worst
    whole, part = torch.ones(8, device=device), torch.ones(8, device=device)
    group = dist.group.WORLD
    collectives = [
        _Collective.as_issued(whole, part, group),
        _Collective.as_issued(part, whole, group, dist.ReduceOp.SUM),
    ]
    room = _Room(collectives)
    for collective in collectives:
        collective.issue(*room.take())
    room.restore()
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.destroy_process_group()
    return differences
