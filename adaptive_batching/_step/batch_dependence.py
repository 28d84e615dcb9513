"""Find the module, if there is one, through which the samples of a batch depend on each other.

Splitting a batch into micro-batches is the same computation only if a model treats each sample by itself. Batch
normalisation does not, nor does anything else that computes over the batch dimension. To find such a module, run two
batches that share one sample, and follow that sample: if it is the same going into a module and different coming out,
the other samples made the difference.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from adaptive_batching._evidence import without_gradients
from adaptive_batching._state import State, rehearsal

# Equal shapes use the same kernels, so values that the other samples do not affect are equal bit for bit. A mixture of
# experts is the exception: its experts get different numbers of tokens, and round differently. So a dependence has to
# be larger than rounding, and its input nearly the same: with a larger difference, a token may go to another expert.
SAME = 1e-5
DIFFERENT = 0.05

_Rows = list[torch.Tensor]
# (module name, number of earlier calls) -> values of sample 0 going in and coming out, in the order of coming out
_Calls = dict[tuple[str, int], tuple[_Rows, _Rows]]


def find_batch_dependent_module(
    model: nn.Module,
    run: Callable[[Any], Any],
    first: Any,
    second: Any,
    *,
    num_samples: int | None = None,
    state: State | None = None,
) -> str | None:
    """Find the first module through which a sample's values depend on the other samples of its batch.

    Return its qualified name and type, such as ``layers.1.norm (BatchNorm1d)``, or None. It is the one that computes
    over the batch itself; if its tensors do not have the samples in dimension 0, the closest parent whose tensors do.

    ``first`` and ``second`` are batches of one shape with the samples in dimension 0, sample 0 the same and the others
    different. Samples should be short, because one token's change is lost among thousands. The batch size should be one
    that no other dimension has, such as 3 or 5; ``num_samples`` gives it if a batch's class may hide its tensors.

    The random state and ``state``, which is that of the model unless it is given, are left as they were. The host holds
    one sample's activations, twice.
    """
    modules = dict(model.named_modules())
    if (name := find_batch_norm(model)) is not None:
        return name
    device = next(model.parameters(), torch.empty(0)).device
    with rehearsal(State([model]) if state is None else state, device) as start_over:
        record = partial(without_gradients, partial(_record, model, run, num_samples))
        expected = record(first)
        start_over()
        outputs = record(second)
    for call, rows in outputs.items():  # children finish before their parents
        went_in, came_out = map(_difference, rows, expected.get(call, ([], [])))
        if went_in is None or came_out is None:
            continue  # a parent will show it
        if went_in < SAME and came_out > DIFFERENT:
            return f"{call[0] or 'model'} ({type(modules[call[0]]).__name__})"
    return None


def find_batch_norm(model: nn.Module) -> str | None:
    """Name the first batch normalisation that takes its statistics from the batch, also if no batch may reach it."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None):
            return f"{name or 'model'} ({type(module).__name__})"
    return None


def _leaves(values: Any) -> list[Any]:
    from torch.utils._pytree import tree_leaves  # private, and only needed here

    return tree_leaves(values)


def _record(model: nn.Module, run: Callable[[Any], Any], num_samples: int | None, batch: Any) -> _Calls:
    leaves = _leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    batch_size = next((v.shape[0] for v in leaves if isinstance(v, torch.Tensor) and v.dim() > 0), num_samples)
    assert batch_size is not None, type(batch)
    names = {module: name for name, module in model.named_modules()}
    times_run: Counter[nn.Module] = Counter()
    entered: list[_Rows] = []  # inputs of the modules that are running, the innermost last
    calls: _Calls = {}

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        entered.append(_rows_of_sample_0((args, kwargs), batch_size))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        calls[names[module], times_run[module]] = entered.pop(), _rows_of_sample_0(output, batch_size)
        times_run[module] += 1

    with contextlib.ExitStack() as stack:
        for module in names:
            # Other hooks are part of a module, so ours go around them. always_call keeps the two paired if a forward
            # raises inside a try.
            stack.enter_context(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            stack.enter_context(module.register_forward_hook(leave, always_call=True))
        with torch.compiler.set_stance("force_eager"):  # compiled code would not call the hooks
            run(batch)
    return calls


def _rows_of_sample_0(values: Any, batch_size: int) -> _Rows:
    """Return sample 0 of batched tensors, as copies on the host: values may change in place, memory may be short."""
    tensors = [v for v in _leaves(values) if isinstance(v, torch.Tensor)]
    return [t[0].detach().to("cpu", copy=True) for t in tensors if t.dim() > 0 and t.shape[0] == batch_size]


def _difference(rows: _Rows, expected: _Rows) -> float | None:
    """Return the largest relative difference between two rows; None if there are no rows or their shapes differ.

    It is the mean absolute difference over the mean absolute value, since single values can be off by chance.
    """
    if not rows or [row.shape for row in rows] != [row.shape for row in expected]:
        return None
    differences = []
    for values in zip(rows, expected, strict=True):
        pair = torch.stack(values)
        pair = (torch.view_as_real(pair) if pair.is_complex() else pair).double()
        changed = ~pair[0].isclose(pair[1], rtol=0, atol=0, equal_nan=True)
        change = (pair[0] - pair[1])[changed].abs().nan_to_num(nan=math.inf).sum()
        scale = pair[pair.isfinite()].abs().sum() / 2
        differences.append(float(change / scale) if change > 0 else 0.0)
    return max(differences)
