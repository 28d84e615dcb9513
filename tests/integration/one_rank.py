"""A sharded model on one rank, recovery armed as on many, with errors injected.

FSDP2 issues no collective where it is alone, and torchtune does not even shard there. What runs here is the rest: its
reset after a broken-off iteration, on the device's streams, and the calls that draining consists of.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from adaptive_batching._memory.unused_memory import release_cached_memory
from adaptive_batching._ranks.agree import Ranks
from adaptive_batching._ranks.fsdp import MicroBatchCollectives, _Collective, _Room
from tests.integration.faults import disarm, full_model, plan
from tests.support.toy_work import run_parts

SIZES: dict[str, Any] = dict(vocab_size=64, num_layers=4, num_heads=2, num_kv_heads=2, embed_dim=32, max_seq_len=16)


def train(device: torch.device, where: str = "forward", layer: int = 0, call: int = 0) -> list[torch.Tensor]:
    """Weights after four steps of two micro-batches each; in the second the ``call``-th one fails, if there is one."""
    torch.manual_seed(0)
    disarm()
    plan.update(where=where, layer=layer)
    model: Any = full_model(**SIZES).to(device)
    mesh = init_device_mesh(device.type, (1,))  # without one, FSDP2 takes a GPU where there is one
    for unit in [*model.layers, model.tok_embeddings, model.output]:
        fully_shard(unit, mesh=mesh)
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
        if number == 1 and call > 0:
            plan.update(call=plan["calls"] + call, times=1)
            assert not run(batches)
        assert run(batches)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.full_tensor().detach().clone() for parameter in model.parameters()]


def differences_on(name: str) -> dict[str, float]:
    """Return the largest difference of any weight to undisturbed training, for each injected error."""
    device = torch.device(name)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    undisturbed = train(device)
    differences = {}
    for where in ("forward", "backward"):
        for layer, call in [(0, 1), (1, 2), (3, 2)]:
            weights = train(device, where, layer, call)
            worst = max(float((a - b).abs().max()) for a, b in zip(weights, undisturbed, strict=True))
            differences[f"in {where}, layer {layer}, micro-batch {call}"] = worst
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
