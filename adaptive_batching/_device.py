"""A device: its name, its random number generators, and copies to it that the host does not wait for."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

_PINS_MEMORY = ("cuda", "xpu")


def device_name(device: torch.device) -> str:
    """Return the name of a device as its maker calls it, or its type."""
    module = torch.get_device_module(device)
    has_name = device.type != "cpu" and hasattr(module, "get_device_name")
    return str(module.get_device_name(device)) if has_name else device.type


class RandomState:
    """The state of all generators of the process: of Python, numpy, torch on the CPU, and all devices of a kind."""

    def __init__(self, device: torch.device) -> None:
        self._of_torch = torch.get_rng_state()
        self._of_devices: list[tuple[torch.device, torch.Tensor]] = []
        if device.type != "cpu":  # all that this process can reach, over which a model may be spread
            module = torch.get_device_module(device)
            count = module.device_count() if hasattr(module, "get_rng_state_all") else 1
            devices = [device] if count == 1 else [torch.device(device.type, index) for index in range(count)]
            self._of_devices = [(each, module.get_rng_state(each)) for each in devices]
        self._of_python = random.getstate()
        numpy_random = sys.modules.get("numpy.random")  # numpy is optional, and without it there is nothing to restore
        self._of_numpy = numpy_random and numpy_random.get_state()

    def put_back(self) -> None:
        torch.set_rng_state(self._of_torch)
        for device, state in self._of_devices:
            torch.get_device_module(device).set_rng_state(state, device)
        random.setstate(self._of_python)
        if self._of_numpy is not None:
            sys.modules["numpy.random"].set_state(self._of_numpy)

    def __eq__(self, other: object) -> bool:
        def known(state: RandomState) -> list[Any]:
            of_torch = [each.tolist() for each in (state._of_torch, *(of_one for _, of_one in state._of_devices))]
            return [state._of_python, str(state._of_numpy), of_torch]

        return isinstance(other, RandomState) and known(self) == known(other)

    __hash__ = None  # type: ignore[assignment]


@contextlib.contextmanager
def unchanged_random_state(device: torch.device) -> Iterator[None]:
    """Restore the random state of Python, numpy and torch on exit, on the CPU and on ``device``."""
    state = RandomState(device)
    try:
        yield
    finally:
        state.put_back()


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of torch's generators on the CPU and on ``device``, for a checkpoint."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore the state from :func:`random_state`; the state of a different kind of device is skipped."""
    torch.set_rng_state(state["cpu"])
    if device.type != "cpu" and device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type], device)


def without_waiting(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``tensor`` on ``device``, and go on while it is copied there.

    A copy from ordinary memory would wait until the device has finished all its work, so that the next micro-batch
    could not be collated meanwhile.
    """
    pins = device.type in _PINS_MEMORY  # elsewhere a copy that is not waited for could outlive its source
    if pins and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=pins)


class Arrival:
    """A number on its way from a device to the host, for which nobody waits."""

    def __init__(self, number: torch.Tensor) -> None:
        self._number, self._event = number.detach(), None
        if number.device.type in _PINS_MEMORY:
            self._number = self._number.to("cpu", non_blocking=True)  # into pinned memory
            self._event = torch.get_device_module(number.device).Event()
            self._event.record()

    @property
    def is_there(self) -> bool:
        """True if :meth:`value` would not wait."""
        return self._number.device.type == "cpu" if self._event is None else bool(self._event.query())

    def value(self) -> float:
        if self._event is not None and not self.is_there:
            self._event.synchronize()
        return float(self._number)
