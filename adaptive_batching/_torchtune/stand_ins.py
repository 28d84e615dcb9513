"""What stands in for activation offloading and for optimizers of bitsandbytes where nothing is computed."""

from __future__ import annotations

import re
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch.autograd.graph import saved_tensors_hooks

from adaptive_batching._trace.bits_and_bytes import BlockWise
from adaptive_batching._values import ConfigError

SMALLEST = 64
"""Bytes from which on an activation moves. torchtune's 1024 may lie between the two batch sizes that are traced, whose
operations must be the same."""

_COPIES = 3  # number of their stream
_MOST_STAYING = 5
_STATES = {"Adam": 2, "AdamW": 2, "Lion": 1, "SGD": 1, "RMSprop": 1, "Adagrad": 1, "LAMB": 2, "AdEMAMix": 3}


class TracedOffloading(saved_tensors_hooks):
    """Does to fake tensors what ``OffloadActivations`` does on CUDA, with its defaults and streams.

    An activation stays on the device until five more have been saved, because the copy to the host may not have ended;
    the last ones go when the first node of the backward pass that takes an activation has run. There an activation
    comes back, on the stream of the copies, and goes when the next such node has run: the copies of one are waited for
    while the next computes. Where it has to be kept until another stream has caught up, that is taken to have.
    """

    def __init__(self) -> None:
        self._count = 0
        self._saved: dict[int, Any] = {}
        self._staying: dict[int, torch.Tensor] = {}
        self._brought: dict[int, torch.Tensor] = {}
        self._graph: int | None = None
        self._node: Any = None
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> int:
        from torch.utils._python_dispatch import is_traceable_wrapper_subclass  # private: a trace can do without

        self._graph = None
        self._count += 1
        number = self._count
        is_weight = isinstance(tensor, (torch.nn.Parameter, torch.nn.Buffer)) or is_traceable_wrapper_subclass(tensor)
        if is_weight or tensor.nbytes < SMALLEST:
            self._saved[number] = tensor
            return number
        self._staying = {each: kept for each, kept in self._staying.items() if each > number - _MOST_STAYING}
        self._staying[number] = tensor
        self._saved[number] = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        return number

    def _unpack(self, number: int) -> torch.Tensor:
        from adaptive_batching._trace.recorder import on_stream  # which a trace has imported

        if self._graph is None:
            self._graph = torch._C._current_graph_task_id()
            torch.autograd.Variable._execution_engine.queue_callback(self._brought.clear)
        saved = self._saved.pop(number)
        if isinstance(saved, torch.Tensor):
            return saved
        node: Any = torch._C._current_autograd_node()
        of_earlier_node: list[int] = []
        if self._graph == torch._C._current_graph_task_id() and node != self._node:
            self._node, of_earlier_node = node, list(self._brought)
        tensor = self._staying.get(number)
        comes_back = tensor is None
        if tensor is None:
            shape, strides, dtype, device = saved
            with on_stream(_COPIES):
                tensor = self._brought[number] = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        uses = _uses(tensor)

        def after_node(outputs: Any, inputs: Any) -> None:
            if comes_back and _uses(self._brought[number]) > uses:  # views of it live on
                del self._brought[number]
            self._staying.clear()
            for earlier in of_earlier_node:
                del self._brought[earlier]

        node.register_hook(after_node)
        return tensor


def _uses(tensor: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def without_kernels(optimizer: DictConfig) -> DictConfig:
    """Return ``optimizer`` of a config, or the component that stands in for one of bitsandbytes."""
    component = str(optimizer["_component_"])
    if not component.startswith("bitsandbytes."):
        return optimizer
    match = re.fullmatch(r"(Paged)?([A-Za-z]+?)(8bit|32bit)?", component.split(".")[-1])
    if match is None or match[2] not in _STATES:
        raise ConfigError(
            f"optimizer._component_={component} is not known to the plan; known are those of bitsandbytes called "
            f"{', '.join(_STATES)}, also Paged..., ...8bit"
        )
    return OmegaConf.create(
        {
            "_component_": f"{BlockWise.__module__}.BlockWise", "lr": optimizer.get("lr", 1e-3),
            "num_states": _STATES[match[2]], "bits": 8 if match[3] == "8bit" else 32, "paged": match[1] is not None,
        }
    )  # fmt: skip
