"""Find the module, if there is one, through which the samples of a batch depend on each other.

Cutting a batch into micro-batches is the same computation only where a model treats each sample by itself. Batch
normalisation does not, nor does whatever else computes over the batch dimension. To find such a module, two batches
are run that have one sample in common, and that sample is followed: where it goes in the same and comes out different,
it was the other samples that made the difference.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from adaptive_batching.random_state import unchanged_random_state

# Equal shapes take the same kernels, so that what other samples do not touch comes out equal bit for bit. Not so with a
# mixture of experts: they get other numbers of tokens, and round otherwise. So a dependence has to be larger than that,
# and to come from an input that is the same or nearly so: a little more, and a token may go to another expert.
SAME = 1e-5
DIFFERENT = 0.05

_Rows = list[torch.Tensor]
_Calls = dict[tuple[str, int], tuple[_Rows, _Rows]]
"""(Module, how often it ran before) -> what sample 0 was going in and coming out, in the order of coming out."""


def find_batch_dependent_module(model: nn.Module, run: Callable[[Any], Any], first: Any, second: Any) -> str | None:
    """Name the first module through which a sample's values depend on the other samples of its batch.

    Model, random state and training mode are left as they are; the runs take no gradients. On the host they take the
    memory of one sample's activations, twice.

    Args:
        model: The model, in the mode to be asked about: batch normalisation in evaluation mode is no dependence.
        run: Takes a batch through the forward pass; called with each of the batches.
        first: A batch of tensors with the samples in dimension 0. Samples should be short, because one token's change
            is lost among thousands, and the batch size one that no other dimension has, such as 3 or 5.
        second: A batch of the same shapes, of which sample 0 is the same and the others are not.

    Returns:
        The module's qualified name and type, e.g. ``layers.1.norm (BatchNorm1d)``, or None. A module that computes
        over the batch itself is named, rather than its children or its parents; where its tensors do not have the
        samples in dimension 0, it is its closest parent whose tensors do.

    Raises:
        Exception: Whatever ``run`` raises.
    """
    modules = dict(model.named_modules())
    for name, module in modules.items():  # also those that these batches may not reach
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            return _describe(name, module)
    expected = _record(model, run, first)
    for call, (inputs, outputs) in _record(model, run, second).items():  # children come out before their parents
        expected_inputs, expected_outputs = expected.get(call, ([], []))
        went_in = _difference(inputs, expected_inputs)
        came_out = _difference(outputs, expected_outputs)
        if went_in is None or came_out is None:
            continue  # a parent will tell
        if went_in < SAME and came_out > DIFFERENT:
            return _describe(call[0], modules[call[0]])
    return None


def _describe(name: str, module: nn.Module) -> str:
    return f"{name or 'model'} ({type(module).__name__})"


def _record(model: nn.Module, run: Callable[[Any], Any], batch: Any) -> _Calls:
    batch_size = next(v.shape[0] for v in tree_leaves(batch) if isinstance(v, torch.Tensor) and v.dim() > 0)
    names = {module: name for name, module in model.named_modules()}
    times_run: Counter[nn.Module] = Counter()
    entered: list[_Rows] = []  # by the modules that are running, the innermost last
    calls: _Calls = {}

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        entered.append(_rows_of_sample_0((args, kwargs), batch_size))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        calls[names[module], times_run[module]] = entered.pop(), _rows_of_sample_0(output, batch_size)
        times_run[module] += 1

    device = next(model.parameters(), torch.empty(0)).device
    with contextlib.ExitStack() as stack:
        stack.enter_context(unchanged_random_state(device))
        stack.enter_context(_unchanged_modules(model))
        for module in names:
            # Other hooks are part of what a module does. Ours come in pairs, also where a forward raises inside a try.
            stack.enter_context(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            stack.enter_context(module.register_forward_hook(leave, always_call=True))
        # Compiled code would not call the hooks.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            run(batch)
    return calls


@contextlib.contextmanager
def _unchanged_modules(model: nn.Module) -> Iterator[None]:
    """Restore what a forward can leave in modules: attributes, and buffers bit for bit."""
    attributes = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    values = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for module, own, buffers in attributes:
            # Both, because an attribute can say what is in a buffer, as with caches that grow.
            vars(module).clear()
            vars(module).update(own)
            module._buffers.clear()
            module._buffers.update(buffers)
        for buffer, value in values:
            buffer.detach().copy_(value)


def _rows_of_sample_0(values: Any, batch_size: int) -> _Rows:
    """Copies on the host, because values can be changed in place and memory of the device may be short."""
    tensors = [v for v in tree_leaves(values) if isinstance(v, torch.Tensor)]
    return [t[0].detach().to("cpu", copy=True) for t in tensors if t.dim() > 0 and t.shape[0] == batch_size]


def _difference(rows: _Rows, expected: _Rows) -> float | None:
    """The largest relative difference between two rows; None where there are none, or others than expected."""
    if not rows or [row.shape for row in rows] != [row.shape for row in expected]:
        return None
    return max(map(_relative_difference, rows, expected))


def _relative_difference(row: torch.Tensor, expected: torch.Tensor) -> float:
    """The mean absolute difference over the mean absolute value: single values can be off by chance."""
    pair = torch.stack([row, expected])
    pair = (torch.view_as_real(pair) if pair.is_complex() else pair).double()
    changed = ~pair[0].isclose(pair[1], rtol=0, atol=0, equal_nan=True)
    change = (pair[0] - pair[1])[changed].abs().nan_to_num(nan=math.inf).sum()
    scale = pair[pair.isfinite()].abs().sum() / 2
    return float(change / scale) if change > 0 else 0.0
