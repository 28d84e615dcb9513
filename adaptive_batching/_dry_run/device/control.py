"""Ask the emulated device that this process runs on: counters, neighbours and faults."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields
from functools import cache

ILLEGAL_ADDRESS, LAUNCH_FAILURE = 700, 719  # cudaError_t: a kernel that went wrong; a device that is gone


@dataclass(frozen=True)
class Counters:
    """Calls that this process has made to the device so far."""

    kernels: int
    products: int  # of matrices, by cuBLAS
    synchronizations: int  # times that the host waited for a stream, an event or the device
    device_allocations: int
    device_frees: int
    copies_to_device: int
    copies_to_host: int
    copies_within: int
    collectives: int
    allocations: int  # of torch's allocator

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    if not hasattr(library, "emulated_counters"):
        needed = "this process does not run on the emulated device"
        raise RuntimeError(f"{needed}; start it with EmulatedDevice().environment()")
    return library


def _tell(name: str, *numbers: int) -> None:  # each takes a register, whatever its type
    getattr(_library(), f"emulated_{name}")(*map(ctypes.c_long, numbers))


def counters() -> Counters:
    numbers = (ctypes.c_long * _library().emulated_number_of_counters())()
    _library().emulated_counters(numbers)
    return Counters(*numbers)


def started_and_waited() -> tuple[int, int]:
    """Return how many kernels, products and copies within the device were started so far, and how often waited for."""
    numbers = _numbers()
    _library().emulated_counters(numbers)
    return numbers[_KERNELS] + numbers[_PRODUCTS] + numbers[_COPIES], numbers[_WAITS]


@cache
def _numbers() -> ctypes.Array[ctypes.c_long]:
    numbers: ctypes.Array[ctypes.c_long] = (ctypes.c_long * _library().emulated_number_of_counters())()
    return numbers


_KERNELS, _PRODUCTS, _COPIES, _WAITS = (
    [field.name for field in fields(Counters)].index(name)
    for name in ("kernels", "products", "copies_within", "synchronizations")
)


def card_of(device: int) -> int:
    """Return the number in the machine of a device's card, which `CUDA_VISIBLE_DEVICES` may have chosen."""
    return int(_library().emulated_card(device))


def most_taken(device: int) -> int:
    """Return the most that all processes of a machine together have taken of a device's card; 0 if they share none."""
    function = _library().emulated_most_taken
    function.restype = ctypes.c_size_t
    return int(function(device))


def settle(stream: int, milliseconds: int) -> None:
    """Wait for the copies and collectives that are pending on a stream, for so long at most; it counts as no wait."""
    _tell("settle", stream, milliseconds)


def count_product(stream: int) -> None:
    """Count a product that no library was asked for, on a stream."""
    _tell("product", stream)


def set_memory(memory_bytes: int) -> None:
    """Have each card be of another size from now on, as `mem_get_info` says; properties that torch has read stay."""
    _tell("set_memory", memory_bytes)


def set_lag(launches: int | None) -> None:
    """Have events happen so many launches later from now on; see `EmulatedDevice.lag`."""
    _tell("set_lag", -1 if launches is None else launches)


def set_neighbour(taken_bytes: int, device: int = 0) -> None:
    """Have another process take so much of the device's memory from now on."""
    _tell("set_neighbour", taken_bytes, device)


def fail_allocations(after: int, times: int = 1) -> None:
    """Have torch's allocator run out of memory after so many allocations, as on a full card, so many times in a row.

    It looks in its cache, asks the device, empties its cache, asks again, and raises. The error names more bytes than
    were asked for, by the size of the card. The first allocation of a process cannot fail so.
    """
    _tell("fail_allocations", after, times)


def fail_device_allocations(after: int, times: int = 2) -> None:
    """Have the device refuse memory after so many calls, so many times: once is a retry of torch's, twice an error."""
    _tell("fail_device_allocations", after, times)


def end_device(after_launches: int, error: int = LAUNCH_FAILURE) -> None:
    """End the device after so many kernels and products: from then on every call returns the error, a `cudaError_t`."""
    _tell("end_device", after_launches, error)


def end_faults() -> None:
    """Forget all faults that are still to come, and have a device that has ended work again."""
    _tell("fail_allocations", -1, 0)
    _tell("end_faults")


def hang_collective(after: int) -> None:
    """Have one collective of this process never end, after so many that do."""
    _tell("hang_collective", after)
