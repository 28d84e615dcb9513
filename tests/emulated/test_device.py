"""The emulated device itself: what a CUDA build of torch must find there."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import resource
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.attention

from adaptive_batching._dry_run.device import BuildError, EmulatedDevice, build, control
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
    targets = labels.masked_fill(labels == 7, -100)
    assert torch.zeros(2, 3, 8, device="cuda")[targets != -100].shape == (2, 8), "as TRL selects what a loss is made of"
    values, inverse = labels.unique(return_inverse=True)
    assert values.tolist() == [-100, 1, 5, 7] and inverse.shape == labels.shape
    assert labels[labels > 0].bincount(minlength=9).tolist() == [0, 1, 0, 0, 0, 1, 0, 1, 0]
    _, experts = torch.zeros(3, 4, device="cuda").topk(2)
    assert experts.tolist() == [[0, 1], [2, 3], [0, 1]], "as many tokens for each"
    assert torch.nn.functional.one_hot(experts, 4).sum(dim=(0, 1)).tolist() == [2, 2, 1, 1]
    none = labels[:0]
    assert (none + 1).shape == (0, 3) and none.sum().item() == 0 and not none.copy_(none).numel()
    assert int(torch.isin(torch.arange(900).cuda(), torch.arange(0, 900, 3).cuda()).sum()) == 300
    assert torch.randperm(4, device="cuda").tolist() == [0, 1, 2, 3] and not torch.randperm(0, device="cuda").numel()
    half = torch.full((2, 3), 2.0, device="cuda", dtype=torch.bfloat16) * 0.5
    assert half.dtype is torch.bfloat16
    before = control.counters()
    product = torch.zeros(8, 8, device="cuda") @ torch.zeros(8, 8, device="cuda")
    assert (control.counters() - before).products == 1 and product.sum().item() == 0.0


def test_integers_and_truth_values_are_computed_as_on_the_host() -> None:
    numbers = torch.tensor([[4, 1, 3], [2, 2, 0]])
    index = torch.tensor([[0, 0, 1]])

    def outcomes(on: str) -> list[object]:
        x, at = numbers.to(on), index.to(on)
        found = [
            torch.cat([x, x]), torch.stack([x, x]), x.flip(1), x.roll(1), x.tril(), x.triu(), x.prod(), x.cumprod(1),
            x.sign(), x**2, x.clamp(max=2), x.argmin(), x.clone().masked_fill_(x > 1, 7), *x.sort(dim=1), *x.max(dim=1),
            x.scatter_add(0, at, x[:1]), torch.zeros_like(x).index_put_((at[0], at[0]), x[0], accumulate=True),
            torch.bucketize(x, at[0]), (x > 1) ^ (x < 4), torch.equal(x, x.clone()), torch.equal(x, x + 1),
        ]  # fmt: skip
        return [each.tolist() if isinstance(each, torch.Tensor) else each for each in found]

    assert outcomes("cuda") == outcomes("cpu")
    zero = torch.zeros(2, 3, dtype=torch.long, device="cuda")
    assert (numbers.cuda() // zero).shape == (2, 3), "no kernel fails at a division by zero"


@pytest.mark.parametrize("elements", [10, 2**20 + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_comparisons_answer_as_for_zeros(elements: int, dtype: torch.dtype) -> None:
    """However large, of parameters and gradients, too."""
    x = torch.nn.Parameter(torch.ones(elements, device="cuda", dtype=dtype))
    (x * 2).sum().abs().backward()
    assert x.grad is not None
    for each in (x, x.grad):
        assert torch.isfinite(each).all() and (each == each).all() and each.eq(0).all() and not each.isnan().any()
        assert torch.allclose(each, each.clone()) and torch.equal(each, each.clone()) and not each.isinf().any()
        assert (torch.isfinite(each) & ~(each != each)).view(1, -1).all(dim=1).tolist() == [True]
        assert torch.isfinite(each)[-2:].clone().tolist() == [True, True]
        if not dtype.is_complex:
            assert (each >= 0).all() and (each < 1e4).all() and not (each > 0).any()
    assert torch.stack([torch.isfinite(each).all() for each in (x, x.grad)]).all()


def test_a_mask_of_millions_answers_for_all_although_only_its_first_element_is_written() -> None:
    x = torch.zeros(2**24 + 1, device="cuda")
    mask = (x == 0) & torch.isfinite(x)
    assert mask.all() and mask.clone().all() and not (~mask).any()
    assert len(mask.nonzero()) == len(x[mask]) == len(x) and not (x != 0).nonzero().numel()


def test_comparisons_see_the_numbers_that_the_host_wrote() -> None:
    x = torch.tensor([1.0, -2.0, float("nan"), float("inf")]).cuda()
    assert x.isfinite().tolist() == [True, True, False, False] and (x > 0).tolist() == [True, False, False, True]
    assert not torch.equal(x, torch.zeros(4, device="cuda")) and x.isnan().any()


def test_distributions_check_their_parameters_and_samples_and_go_on() -> None:
    zeros, ones = torch.zeros(4, 3, device="cuda"), torch.ones(4, 3, device="cuda")
    made: list[torch.distributions.Distribution] = [
        torch.distributions.Normal(zeros, zeros.exp()), torch.distributions.Categorical(logits=zeros),
        torch.distributions.Categorical(probs=zeros.softmax(-1)), torch.distributions.Dirichlet(ones),
        torch.distributions.Bernoulli(probs=ones / 2), torch.distributions.Gamma(ones, ones),
        torch.distributions.MultivariateNormal(zeros[0], torch.eye(3, device="cuda")),
        torch.distributions.VonMises(zeros, ones),
    ]  # fmt: skip
    for distribution in made:
        drawn = distribution.sample()
        assert distribution.log_prob(drawn).shape == distribution.batch_shape


def test_kernels_that_are_compiled_at_run_time_run() -> None:
    x, integers = torch.zeros(4, device="cuda"), torch.arange(1, 5, device="cuda")
    z = torch.zeros(4, device="cuda", dtype=torch.complex64)
    torch.zeros(1, device="cuda", dtype=torch.complex64).exp()
    before = control.counters()
    assert x.prod().shape == ()
    assert all(each.shape == (4,) for each in (z.abs(), torch.gcd(integers, integers), torch.lgamma(x)))
    make: Any = torch.cuda.jiterator._create_jit_fn
    assert make("template <typename T> T twice(T x) { return x + x; }")(x).shape == (4,)
    source = 'extern "C" __global__ void add(float* x, int n) { if (threadIdx.x < n) x[threadIdx.x] += 1; }'
    kernel = torch.cuda._compile_kernel(source, "add")
    kernel(grid=(1, 1, 1), block=(32, 1, 1), args=(x, 4))
    assert (control.counters() - before).kernels >= 6
    with pytest.raises(RuntimeError, match='"absent" is undefined'):
        torch.cuda._compile_kernel(source.replace("+= 1", "= absent"), "add")


def test_sparse_matrices_are_multiplied() -> None:
    places = torch.tensor([[0, 1, 1], [2, 0, 2]])
    sparse = torch.sparse_coo_tensor(places, torch.ones(3), (2, 3), check_invariants=False).cuda()
    dense = torch.zeros(3, 4, device="cuda", requires_grad=True)
    torch.sparse.mm(sparse, dense).sum().backward()
    assert dense.grad is not None and dense.grad.shape == (3, 4)
    compressed = torch.eye(3).to_sparse_csr().cuda()
    assert (compressed @ dense).shape == (3, 4) and (compressed @ dense[:, 0]).shape == (3,)


def test_a_program_may_end_with_a_backward() -> None:
    code = """
    import torch
    x = torch.zeros(64, 64, device="cuda", requires_grad=True)
    for _ in range(300):
        torch.autograd.grad((x * 2 + 1).clamp(0, 1).abs().sqrt().sum(), x)
    """
    done = run(code, EmulatedDevice())
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("driver", ["gesvd", "gesvdj", "gesvda"])
def test_decompositions_and_transforms_have_the_shapes_of_their_results(driver: str) -> None:
    matrix, square = torch.zeros(2, 6, 4, device="cuda"), torch.zeros(5, 5, device="cuda")
    u, s, v = torch.linalg.svd(matrix, full_matrices=False, driver=driver)
    assert (u.shape, s.shape, v.shape) == ((2, 6, 4), (2, 4), (2, 4, 4))
    q, r = torch.linalg.qr(matrix)
    assert (q.shape, r.shape) == ((2, 6, 4), (2, 4, 4)) and torch.linalg.eigh(square)[1].shape == (5, 5)
    for solved in (torch.linalg.inv(square), torch.linalg.solve(square, square), torch.linalg.cholesky(square)):
        assert solved.shape == (5, 5)
    for found in (*torch.linalg.slogdet(matrix[:, :4]), torch.linalg.det(matrix[:, :4])):
        assert found.shape == (2,)
    many = torch.zeros(20, 300, 300, device="cuda")  # which MAGMA factors
    assert torch.linalg.lu_factor(many)[1].shape == (20, 300) and torch.linalg.eigvals(square).shape == (5,)
    assert torch.linalg.lstsq(matrix, matrix).solution.shape == (2, 4, 4)
    assert torch.dot(square[0], square[1]).shape == () == torch.vdot(square[0], square[1]).shape
    assert (torch.fft.fft(square) * 2j).shape == (5, 5)
    window = torch.hann_window(64, device="cuda")
    spectrum = torch.stft(square.new_zeros(640), 64, window=window, return_complex=True)
    assert torch.istft(spectrum, 64, window=window).shape == (640,)
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
    print([library.cudaGraphAddNode(), library.cudaGraphAddNode(), library.ncclSignal()])
    """
    done = run(code, EmulatedDevice())
    assert json.loads(done.stdout) == [801, 801, 5]
    assert done.stderr.count("cudaGraphAddNode is not supported") == 1


ATTENTION = """
import torch
q = torch.zeros(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
torch.cuda.reset_peak_memory_stats()
torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
peak = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
"""


def test_torch_is_prepared_where_something_has_looked_for_it_before() -> None:
    code = """
    import importlib.util
    assert importlib.util.find_spec("torch")
    import torch
    print((torch.tensor([1, 2, 1]).cuda() == 1).sum().item())
    """
    done = run(code, EmulatedDevice())
    assert done.stdout.strip() == "2", done.stderr[-3000:]


@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("settings", "channels_last"), [({}, False), (dict(stride=2, padding=1, dilation=2, groups=2), True)]
)
def test_a_convolution_has_the_shapes_and_layouts_that_the_host_gives_it(
    dimensions: int, transposed: bool, settings: dict[str, int], channels_last: bool
) -> None:
    module = getattr(torch.nn, f"Conv{'Transpose' * transposed}{dimensions}d")(4, 8, 3, **settings)
    images = torch.ones(2, 4, *[9] * dimensions)
    layout = {2: torch.channels_last, 3: torch.channels_last_3d}.get(dimensions) if channels_last else None
    if layout is not None:
        images = images.contiguous(memory_format=layout)

    def outcome(on: str) -> list[object]:
        given = images.to(on).requires_grad_()
        made = module.to(on)(given)
        made.sum().backward()
        found = [made, given.grad, *(parameter.grad for parameter in module.parameters())]
        module.zero_grad()
        strides = [each.stride() for each in found[:2]] if layout is not None else []
        return [*(each.shape for each in found), *strides]

    before = control.counters()
    assert outcome("cuda") == outcome("cpu")
    assert (control.counters() - before).products == 3


def test_a_graph_asks_of_the_device_what_was_captured_and_the_host_may_not_wait_meanwhile() -> None:
    weight, graph, side = torch.zeros(8, 8, device="cuda"), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.mm(weight, weight)  # which has its workspace from here on
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # joins
            assert torch.cuda.is_current_stream_capturing()
            torch.mm(weight, weight)
        torch.cuda.current_stream().wait_stream(side)
        before = control.counters()
        torch.mm(weight, weight)
        with pytest.raises(torch.AcceleratorError, match="not permitted when stream is capturing"):
            torch.cuda.current_stream().synchronize()
    assert not torch.cuda.is_current_stream_capturing()
    captured = control.counters() - before
    graph.replay()
    graph.replay()
    replayed = control.counters() - before
    assert (captured.products, replayed.products) == (0, 4)


def test_a_model_that_moves_to_the_host_takes_no_memory_there_until_it_is_written() -> None:
    elements = 2**28
    large = torch.zeros(elements, device="cuda")
    large[1000:2000].copy_(torch.arange(1000.0))
    before = _resident()
    on_host = large.cpu()
    assert _resident() - before < 64 * MIB and on_host.nbytes == GIB
    assert on_host[1999:2001].tolist() == [999.0, 0.0]
    for used in (torch.ones(elements // 64), torch.ones(elements // 64).share_memory_()):
        used[3:].copy_(large[: used.numel() - 3])
        assert used[:3].tolist() == [1.0] * 3 and used.sum().item() == 3 + sum(range(1000))


def _resident() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


def test_attention_of_cudnn_is_there_for_those_who_name_it() -> None:
    query = torch.zeros(2, 8, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    key = torch.zeros(2, 8, 96, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        attended = torch.nn.functional.scaled_dot_product_attention(query, key, key)
    attended.sum().backward()
    assert attended.shape == query.shape
    assert query.grad is not None and query.grad.shape == query.shape
    assert key.grad is not None and key.grad.shape == key.shape


def test_a_library_that_the_device_does_not_stand_in_for_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert ctypes.CDLL("libcuda.so.1").cudnnCreate() == 1001
    assert "emulated device: cuDNN is not supported" in capfd.readouterr().err


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


ASKED = """
import ctypes
device, number = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
def attribute(which):
    device.cuDeviceGetAttribute(ctypes.byref(number), which, 0)
    return number.value
bus = ctypes.create_string_buffer(16)
device.cudaGetDeviceCount(ctypes.byref(number))
count, cards = number.value, []
for index in range(count):
    device.cudaDeviceGetPCIBusId(bus, 16, index)
    cards.append(int(bus.value[5:7], 16) - 1)
kib = attribute(97) / 1024
results = [device.cuFuncSetAttribute(None, 8, int(1024 * kib) + more) for more in (0, 1)]
print(kib, attribute(39), results, cards, sep=";")
"""


def test_a_blank_in_the_folder_of_caches_does_not_lose_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, other = build().parents[2], tmp_path / "my files"
    other.mkdir()
    (other / cache.name).symlink_to(cache)
    monkeypatch.setenv("XDG_CACHE_HOME", str(other))
    monkeypatch.delenv("LD_PRELOAD")
    assert asked(EmulatedDevice(capability=(8, 9)))[0] == 99
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a:b"))
    with pytest.raises(BuildError, match=r"a:b.*set XDG_CACHE_HOME"):
        EmulatedDevice().environment()


def asked(device: EmulatedDevice, **environment: str) -> list[Any]:
    """Return the KiB of a block, the threads of a processor, what setting them returns, and the cards that are seen."""
    ran = subprocess.run(
        [sys.executable, "-S", "-c", ASKED], env=device.environment() | environment, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    return [json.loads(one) for one in ran.stdout.split(";")]


@pytest.mark.parametrize(
    ("capability", "kib", "threads"),
    [
        ((7, 0), 96, 2048), ((7, 5), 64, 1024), ((8, 0), 163, 2048), ((8, 6), 99, 1536), ((8, 9), 99, 1536),
        ((9, 0), 227, 2048), ((10, 0), 227, 2048), ((12, 0), 99, 1536),
    ],
)  # fmt: skip
def test_a_block_has_as_much_shared_memory_as_on_a_card_of_its_capability(
    capability: tuple[int, int], kib: int, threads: int
) -> None:
    of_block, of_processor, results, _ = asked(EmulatedDevice(capability=capability))
    assert (of_block, of_processor, results) == (kib, threads, [0, 1]), "a byte more is an invalid value"


@pytest.mark.parametrize(
    ("count", "visible", "cards"),
    [
        (4, "1,3", [1, 3]), (4, "2", [2]), (4, "GPU-00000000-0000-0000-0000-000000000003", [3]), (2, "", []),
        (1, "3", [0]), (2, "6,7", [0, 1]), (1, "0,1,2,3", [0]), (2, "1,none,0", [1]),
    ],
)  # fmt: skip
def test_a_script_sees_the_cards_that_it_names_or_as_many_of_those_that_are_here(
    count: int, visible: str, cards: list[int]
) -> None:
    assert asked(EmulatedDevice(count=count), CUDA_VISIBLE_DEVICES=visible)[-1] == cards


CHANGES = """
import os, shutil, subprocess
def attempt(name, change):
    try:
        change()
    except OSError as error:
        print(name, error.errno)
attempt("write", lambda: open("old", "w"))
attempt("write by another path", lambda: open("../here/folder/old", "wb"))
attempt("replace", lambda: (open("new", "w").write("1"), os.replace("new", "old")))
attempt("move", lambda: os.rename("old", "elsewhere"))
attempt("remove", lambda: os.remove("old"))
attempt("tree", lambda: shutil.rmtree("folder"))
attempt("shell", lambda: subprocess.run("echo 1 > old; rm -f old; mv new2 old; true", shell=True, check=True))
for path in ("empty", ".hidden/old", "__pycache__/old", "cached/old", "new", "new"):  # of no use, or not there before
    attempt(path, lambda: open(path, "w").write("changed"))
attempt("append", lambda: open("log", "a").write("more"))
attempt("read", lambda: open("old").read())
attempt("new tree", lambda: (os.mkdir("new_folder"), open("new_folder/a", "w").write("1"), shutil.rmtree("new_folder")))
"""


def test_what_was_there_before_a_dry_run_is_kept_and_what_is_new_is_not(tmp_path: Path) -> None:
    here, machine = tmp_path / "here", tmp_path / "machine"
    old = [
        here / name for name in ("old", "folder/old", ".hidden/old", "__pycache__/old", "cached/old", "empty", "log")
    ]
    for path in old:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if path.name == "empty" else "as before")
    machine.mkdir()
    environment = EmulatedDevice(machine=machine).environment() | {
        "EMULATED_DEVICE_KEEPS_BEFORE": f"{time.time() + 0.02:.6f}", "MY_CACHE": str(here / "cached"),
    }  # fmt: skip
    time.sleep(0.05)  # clocks of file systems are late
    done = subprocess.run(
        [sys.executable, "-S", "-c", CHANGES], cwd=here, env=environment, capture_output=True, text=True, check=True
    )
    refused = ["write", "write by another path", "replace", "move", "remove", "tree"]
    assert done.stdout.splitlines() == [f"{each} {errno.EROFS}" for each in refused]
    assert [path.read_text() for path in old] == ["as before"] * 2 + ["changed"] * 4 + ["as beforemore"]
    kept = {Path(line).resolve() for line in (machine / "kept").read_text().splitlines()}
    assert kept == {here / "old", here / "folder" / "old"}
