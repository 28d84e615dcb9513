"""The emulated device itself: what a CUDA build of torch must find there."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import textwrap

import pytest
import torch

from adaptive_batching._emulated_device import EmulatedDevice, control
from tests.conftest import ROOT

GIB, MIB = 2**30, 2**20


def run(code: str, device: EmulatedDevice, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """Run a program on a device of its own, in as many processes."""
    launch = f"-m torch.distributed.run --standalone --nproc_per_node {ranks} --no-python {sys.executable}".split()
    return subprocess.run(
        [sys.executable, *(launch if ranks > 1 else []), "-c", textwrap.dedent(code)],
        cwd=ROOT, env=device.environment(), text=True, capture_output=True, timeout=120, check=False,
    )  # fmt: skip


def test_the_allocator_fails_at_the_cards_size_and_says_what_is_left() -> None:
    control.set_memory(4 * GIB)
    held = torch.empty(3 * GIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError, match=r"total capacity of 4\.00 GiB of which .* MiB is free"):
        torch.empty(GIB, dtype=torch.uint8, device="cuda")
    free, total = torch.cuda.mem_get_info()
    assert total == 4 * GIB and 0 <= free < GIB
    control.set_neighbour(free // 2)
    assert torch.cuda.mem_get_info()[0] == free - free // 2
    del held


def test_counts_have_their_values_and_products_have_none() -> None:
    labels = torch.tensor([[5, -100, 7], [-100, -100, 1]], device="cuda")
    count = (labels != -100).sum()
    count += 3
    assert count.item() == 6 and (count / 4).item() == 1.5 and (count % 4).item() == 2
    assert torch.arange(4, device="cuda").cumsum(0).tolist() == [0, 1, 3, 6]
    assert labels.max(dim=1, keepdim=False)[0].shape == (2,) and labels.max().item() == 7
    assert labels[labels > 0].tolist() == [5, 7, 1]
    none = labels[:0]
    assert (none + 1).shape == (0, 3) and none.sum().item() == 0 and not none.copy_(none).numel()
    assert int(torch.isin(torch.arange(900).cuda(), torch.arange(0, 900, 3).cuda()).sum()) == 300
    assert torch.randperm(4, device="cuda").tolist() == [0, 1, 2, 3] and not torch.randperm(0, device="cuda").numel()
    half = torch.full((2, 3), 2.0, device="cuda", dtype=torch.bfloat16) * 0.5
    assert half.dtype is torch.bfloat16
    before = control.counters()
    product = torch.zeros(8, 8, device="cuda") @ torch.zeros(8, 8, device="cuda")
    assert (control.counters() - before).products == 1 and product.sum().item() == 0.0


@pytest.mark.parametrize("driver", ["gesvd", "gesvdj", "gesvda"])
def test_decompositions_and_transforms_have_the_shapes_of_their_results(driver: str) -> None:
    matrix, square = torch.zeros(2, 6, 4, device="cuda"), torch.zeros(5, 5, device="cuda")
    u, s, v = torch.linalg.svd(matrix, full_matrices=False, driver=driver)
    assert (u.shape, s.shape, v.shape) == ((2, 6, 4), (2, 4), (2, 4, 4))
    q, r = torch.linalg.qr(matrix)
    assert (q.shape, r.shape) == ((2, 6, 4), (2, 4, 4)) and torch.linalg.eigh(square)[1].shape == (5, 5)
    for solved in (torch.linalg.inv(square), torch.linalg.solve(square, square), torch.linalg.cholesky(square)):
        assert solved.shape == (5, 5)
    assert torch.fft.fft(torch.zeros(3, 64, device="cuda")).shape == (3, 64)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    plane = torch.zeros(1024, 1024, device="cuda", dtype=torch.complex64)
    changed = torch.fft.ifft2(plane)
    assert torch.cuda.max_memory_allocated() - before >= 3 * changed.nbytes, "both planes and the plan's workspace"


@pytest.mark.parametrize(("of_torch", "times", "errors"), [(True, 1, 1), (False, 1, 0), (False, 2, 1)])
def test_the_allocation_that_is_told_to_fails_as_on_a_full_card(of_torch: bool, times: int, errors: int) -> None:
    """A device that refuses once is asked again."""
    torch.empty(1, device="cuda")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_stats()
    if of_torch:
        control.fail_allocations(after=2)
    else:
        control.fail_device_allocations(after=0, times=times)
    held = [torch.empty(100, device="cuda") for _ in range(2 * of_torch)]
    with pytest.raises(torch.OutOfMemoryError) if errors else contextlib.nullcontext():
        torch.empty(GIB, dtype=torch.uint8, device="cuda")
    torch.empty(100, device="cuda")
    after = torch.cuda.memory_stats()
    assert [after[name] - before[name] for name in ("num_ooms", "num_alloc_retries")] == [errors, 1]
    del held


@pytest.mark.parametrize(("lag", "held"), [(0, [128, 192, 256]), (5, [192, 192, 256]), (None, [192, 256, 256])])
def test_memory_that_another_stream_uses_is_held_as_long_as_the_stream_lags(lag: int | None, held: list[int]) -> None:
    def reserved() -> int:
        return (torch.cuda.memory_reserved() - before) // MIB

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    control.set_lag(lag)
    side, elements, found = torch.cuda.Stream(), 2**24, []
    used = torch.zeros(elements, device="cuda")
    with torch.cuda.stream(side):
        made = used * 2
    used.record_stream(side)
    del used
    kept = [made, torch.zeros(elements, device="cuda")]
    found.append(reserved())
    for _ in range(10):
        kept[1].mul_(2)
    kept.append(torch.zeros(elements, device="cuda"))
    found.append(reserved())
    torch.cuda.synchronize()
    kept.append(torch.zeros(elements, device="cuda"))
    assert [*found, reserved()] == held


def test_a_function_that_the_device_lacks_is_named_and_fails() -> None:
    code = """
    import ctypes
    library = ctypes.CDLL("libcuda.so.1")
    print([library.cudaGraphLaunch(), library.cudaGraphLaunch(), library.ncclSignal()])
    """
    done = run(code, EmulatedDevice())
    assert json.loads(done.stdout) == [801, 801, 5]
    assert done.stderr.count("cudaGraphLaunch is not supported") == 1


ATTENTION = """
import torch
q = torch.zeros(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
torch.cuda.reset_peak_memory_stats()
torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
peak = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
"""


def test_flash_attention_runs_on_hopper_too() -> None:
    here: dict[str, int] = {}
    exec(ATTENTION, here)
    done = run(ATTENTION + "print(peak)", EmulatedDevice(capability=(9, 0)))
    assert done.stdout.strip() == str(here["peak"]), done.stderr[-3000:]


RANKS = """
import os, time, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("cuda:nccl,cpu:gloo", device_id=torch.device("cuda", rank))
def on_device(values): return torch.tensor(values).cuda()
total = on_device([rank + 1, 2 * rank]); dist.all_reduce(total); assert total.tolist() == [3, 2]
most = on_device([3.5 * rank]); dist.all_reduce(most, dist.ReduceOp.MAX); assert most.item() == 3.5
mean = on_device([2.0 * rank]).bfloat16(); dist.all_reduce(mean, dist.ReduceOp.AVG); assert mean.item() == 1.0
parts = [torch.zeros(2, dtype=torch.long, device="cuda") for _ in range(2)]
dist.all_gather(parts, on_device([rank, rank + 5])); assert [p.tolist() for p in parts] == [[0, 5], [1, 6]]
told = on_device([rank * 7 + 1.5]); dist.broadcast(told, 1); assert told.item() == 8.5
half = torch.zeros(2, device="cuda"); dist.reduce_scatter_tensor(half, on_device([1.0, 2.0, 3.0, 4.0]))
assert half.tolist() == [2.0 + 4 * rank, 4.0 + 4 * rank]
objects = [None, None]; dist.all_gather_object(objects, {"rank": rank}); assert objects == [{"rank": 0}, {"rank": 1}]
mesh = init_device_mesh("cuda", (2,))
sharded = distribute_tensor(torch.arange(8.0).view(4, 2).cuda(), mesh, [Shard(0)])
assert sharded.full_tensor().flatten().tolist() == list(range(8))
if rank == 0:
    dist.barrier(dist.new_group([0, 1], backend="gloo"))
else:
    late = on_device([1.0]); work = dist.all_reduce(late, async_op=True)
    assert not work.is_completed(), "the other rank has not joined"
    dist.barrier(dist.new_group([0, 1], backend="gloo"))
if rank == 0:
    late = on_device([1.0]); dist.all_reduce(late)
else:
    work.wait()
assert late.item() == 2.0
side = torch.cuda.Stream()
for number in range(20):  # of one communicator, on two streams
    gathered = [torch.zeros(1, dtype=torch.long, device="cuda") for _ in range(2)]
    with torch.cuda.stream(side if (number + rank) % 2 else torch.cuda.current_stream()):
        one = on_device([number]); dist.all_reduce(one); dist.all_gather(gathered, one)
        assert [each.item() for each in gathered] == [2 * number] * 2
large = torch.zeros(10**7, device="cuda"); dist.all_reduce(large); torch.cuda.synchronize()
print("done")
"""


def test_ranks_get_over_nccl_what_they_would_get() -> None:
    done = run(RANKS, EmulatedDevice(count=2), ranks=2)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("done") == 2
