from __future__ import annotations

import ctypes
import mmap
import os
import resource
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from adaptive_batching._memory import unused_memory
from adaptive_batching._memory.caching_allocator import (
    _ALLOCATOR_VARIABLES,
    allocator_advice,
    workspace_bytes,
)
from adaptive_batching._memory.host_limits import status
from adaptive_batching._memory.meter import CpuMeter, MemoryMeter, memory_meter
from adaptive_batching._memory.out_of_memory import forget_frames, is_out_of_memory
from adaptive_batching._memory.unused_memory import (
    keep_freed_memory_on_the_host,
    keep_little_on_the_host,
    release_cached_memory,
)

MIB = 2**20
MAP_NORESERVE = 0x4000  # of Linux, which Python 3.11 has no name for


# What libraries really say, each as torch passes it on.
OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB."),
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("std::bad_alloc"),
    RuntimeError("Resource temporarily unavailable"),  # a thread that cannot start, which is all that it says
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API"),
    RuntimeError("HIP out of memory. Tried to allocate 20.00 MiB"),
    RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
    RuntimeError("Native API failed. Native API returns: 38 (UR_RESULT_ERROR_OUT_OF_HOST_MEMORY)"),
    RuntimeError("MPS backend out of memory (MPS allocated: 17.9 GB, other allocations: 240 MB, max allowed: 18.1 GB)"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("could not create a primitive"),  # oneDNN
    RuntimeError("could not create a memory object"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
]
NCCL_OUT_OF_MEMORY = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.27.5\nncclUnhandledCudaError: Call to CUDA function failed.\n"
    "Last error:\nCuda failure 2 'out of memory'"
)
OTHER = [
    RuntimeError("could not create a primitive descriptor for a matmul primitive"),
    RuntimeError("shape mismatch"),
    ValueError("out of memory"),
    KeyboardInterrupt(),
    torch.distributed.DistBackendError(NCCL_OUT_OF_MEMORY),
    RuntimeError(NCCL_OUT_OF_MEMORY),  # as some wrappers raise it again
    RuntimeError("oneCCL: allreduce failed: UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY"),
    RuntimeError("UR backend failed. UR backend returns:40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`"),
    RuntimeError("out of resource: shared memory, Required: 262144, Hardware limit: 232448."),
]


@pytest.mark.parametrize(
    ("error", "expected"),
    [*((error, True) for error in OUT_OF_MEMORY), *((error, False) for error in OTHER)],
    ids=lambda value: f"{type(value).__name__}-{str(value)[:40]}",
)
def test_out_of_memory_errors_of_every_backend_are_known_and_others_are_not_taken_for_it(
    error: BaseException, expected: bool
) -> None:
    assert is_out_of_memory(error) is expected


NO_ENGINE = "FIND was unable to find an engine to execute this computation"


@pytest.mark.parametrize(
    "message", ["CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", NO_ENGINE]
)
@pytest.mark.parametrize(("free", "expected"), [(20 * MIB, True), (2**33, False), (None, False)])
def test_a_library_that_cannot_start_lacks_memory_where_there_is_a_device_and_little_is_free(
    free: int | None, expected: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mem_get_info() -> tuple[int, int]:
        if free is None:
            raise AssertionError("Torch not compiled with CUDA enabled")
        return free, 80 * 2**30

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    assert is_out_of_memory(RuntimeError(message)) == expected


def test_a_convolution_without_an_engine_lacks_memory_where_a_limit_on_the_process_leaves_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_device: dict[str, object] = {
        "mem_get_info": (2**36, 2**36), "is_initialized": True, "get_per_process_memory_fraction": 0.25,
    }  # fmt: skip
    for name, value in of_device.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    for allocated, expected in ((2**34 - MIB, True), (2**33, False)):
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda allocated=allocated: allocated)
        assert is_out_of_memory(RuntimeError(NO_ENGINE)) == expected


def test_a_kept_error_holds_no_tensors_once_its_frames_are_forgotten() -> None:
    tensors = []

    def step() -> None:
        activations = torch.ones(3)
        tensors.append(weakref.ref(activations))
        try:
            raise ValueError("no such kernel")
        except ValueError:
            raise torch.OutOfMemoryError("CUDA out of memory") from None

    try:
        step()
    except torch.OutOfMemoryError as error:
        kept = error
    kept.with_traceback(None)
    assert tensors[0]() is not None, "held by the first of the two errors"
    forget_frames(kept)
    assert tensors[0]() is None
    assert isinstance(kept.__context__, ValueError), "what happened is still known"


def _take(num_bytes: int) -> None:
    """Use memory of the system for a moment. Of freed tensors, malloc may keep what fits what earlier tests left."""
    with mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        for page in range(0, num_bytes, mmap.PAGESIZE):
            pages[page] = 1


def test_the_peak_is_what_was_in_use_at_once() -> None:
    meter = CpuMeter()
    meter.release()
    meter.reset_peak()
    before = meter.used_bytes()
    _take(100 * MIB)
    _take(60 * MIB)
    first = meter.peak_bytes()
    assert 95 * MIB < first - before < 130 * MIB
    meter.release()
    meter.reset_peak()
    assert meter.peak_bytes() < first - 50 * MIB


def test_within_a_limit_that_bounds_what_is_free_memory_runs_out() -> None:
    meter = CpuMeter()
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    with meter.limit(meter.used_bytes() + 200 * MIB):
        assert meter.free_bytes() <= 200 * MIB
        assert meter.total_bytes == resource.getrlimit(resource.RLIMIT_DATA)[0]
        torch.ones(100 * MIB, dtype=torch.uint8)
        with pytest.raises(RuntimeError) as error:
            torch.ones(4096 * MIB, dtype=torch.uint8)  # more than earlier tests can have left on the heap
    assert is_out_of_memory(error.value)
    assert resource.getrlimit(resource.RLIMIT_DATA) == limits
    assert meter.free_bytes() > 300 * MIB
    torch.ones(300 * MIB, dtype=torch.uint8)


def test_a_device_without_statistics_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: object())
    with pytest.raises(NotImplementedError, match="device='mps' reports no peak memory; set use_maximum_batch_size"):
        memory_meter("mps")


class Allocator:
    """The statistics of an accelerator's caching allocator, as torch's device modules give them."""

    def __init__(self, *, enforces: bool) -> None:
        self.fraction = 1.0
        if enforces:
            self.set_per_process_memory_fraction = self._set
            self.get_per_process_memory_fraction = lambda device: self.fraction

    def _set(self, fraction: float, device: torch.device) -> None:
        self.fraction = fraction

    current_device = staticmethod(lambda: 0)
    mem_get_info = staticmethod(lambda device: (300, 1000))  # free, total: others hold what is not reserved here
    memory_allocated = staticmethod(lambda device: 100)
    memory_reserved = staticmethod(lambda device: 180)
    max_memory_allocated = staticmethod(lambda device: 150)
    max_memory_reserved = staticmethod(lambda device: 190)


@pytest.mark.parametrize("enforces", [True, False])
def test_an_accelerator_counts_what_others_hold_and_bounds_itself_where_it_can(
    enforces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator = Allocator(enforces=enforces)
    monkeypatch.setattr(torch, "get_device_module", lambda device: allocator)
    meter = MemoryMeter(torch.device("cuda"))
    assert meter.device == torch.device("cuda", 0)
    assert (meter.total_bytes, meter.used_bytes(), meter.free_bytes()) == (1000, 100, 300 + 80)
    assert (meter.peak_bytes(), meter.peak_allocated_bytes()) == (190, 150), "a limit counts what is reserved"
    assert meter.outside_bytes() == 1000 - 300 - 180
    if enforces:
        allocator.fraction = 0.25
        assert (meter.total_bytes, meter.free_bytes()) == (250, 250 - 180 + 80), "a share that the user has set"
        allocator.fraction = 1.0
    with pytest.raises(KeyError), meter.limit(400):
        assert allocator.fraction == (0.4 if enforces else 1.0)
        raise KeyError
    assert allocator.fraction == 1.0


@pytest.mark.parametrize(("device_type", "pins"), [("cuda", True), ("xpu", True), ("mps", False), ("npu", False)])
def test_pinned_memory_that_a_step_took_is_given_back(
    device_type: str, pins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back: list[str] = []
    device = SimpleNamespace(empty_cache=lambda: given_back.append("device"))
    monkeypatch.setattr(torch, "get_device_module", lambda device_: device)
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: given_back.append("host"), raising=False)
    monkeypatch.setattr(unused_memory, "forget_failed_backward", lambda device: None)  # there is no such device
    release_cached_memory(SimpleNamespace(type=device_type))  # type: ignore[arg-type]
    assert given_back == ["device", "host"][: 1 + pins]


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings of the allocator in the environment."""
    for name in _ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("variable", "value", "rocm", "advised"),
    [
        (None, "", None, True),
        (None, "", "6.4.43482", False),
        (None, "", "7.0.51831", True),
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:512", None, True),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True", None, False),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False", None, False),
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync", None, False),
    ],
)
def test_expandable_segments_are_advised_where_there_are_such_and_settings_are_part_of_what_was_probed(
    variable: str | None, value: str, rocm: str | None, advised: bool, unset: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", rocm)
    if variable is not None:
        monkeypatch.setenv(variable, value)
    assert (allocator_advice(torch.device("cuda")) is not None) == advised
    assert allocator_advice(torch.device("cpu")) is None
    monkeypatch.setattr(torch, "get_device_module", lambda device: Allocator(enforces=True))
    settings = MemoryMeter(torch.device("cuda")).allocator_settings()
    assert settings == ({} if variable is None else {variable: value})


@pytest.fixture
def limited() -> Iterator[None]:
    """A limit on this process's data, far away."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (2**44, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)


def test_in_a_process_with_a_limit_what_that_counts_is_measured(limited: None) -> None:
    meter = CpuMeter()
    meter.reset_peak()
    before = meter.used_bytes()
    above = status("VmPeak") - status("VmSize") + 300 * MIB
    # Other tests may have had more of the address space than there is memory: the kernel must not set it aside here.
    untouched = mmap.mmap(-1, above, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    assert meter.used_bytes() - before >= above
    untouched.close()
    assert meter.used_bytes() - before < 100 * MIB
    assert above <= meter.peak_bytes() - before < above + 100 * MIB
    meter.reset_peak()
    before = meter.used_bytes()  # less, where a thread that another test has left has ended, and with it its heap
    touched = torch.ones(100 * MIB, dtype=torch.uint8)
    del touched
    assert 60 * MIB < meter.peak_bytes() - before < 200 * MIB, "no new peak of the address space"


def test_libraries_are_told_to_keep_little_where_the_process_has_a_limit(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    monkeypatch.setattr(
        ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=lambda *given: told.append(given), malloc_trim=int)
    )
    keep_little_on_the_host()
    assert not told and "ONEDNN_PRIMITIVE_CACHE_CAPACITY" not in os.environ
    request.getfixturevalue("limited")
    keep_little_on_the_host()
    assert told and os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "1"
    assert CpuMeter().is_predictable
    little = told[:]
    keep_freed_memory_on_the_host()
    release_cached_memory(torch.device("cpu"))
    assert told[: len(little)] == told[-len(little) :] == little != told[len(little) : 2 * len(little)]


@pytest.mark.parametrize(
    ("major", "chosen", "size"),
    [(None, "", 8320), (8, "", 8320), (9, "", 32768), (12, "", 32768), (9, ":4096:2:16:8", 8320), (8, "4", 8320)],
)
def test_a_workspace_of_cublas_has_the_size_that_torch_gives_it(
    major: int | None, chosen: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", chosen)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: major is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, 0))
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.13.0"))
    assert workspace_bytes(0) == size * 2**10
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.11.0"))
    assert (workspace_bytes(0) == size * 2**10) == (major != 12)
