from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from torchtune.models.llama2 import llama2
from torchtune.modules import TransformerSelfAttentionLayer
from torchtune.training import set_activation_checkpointing

from adaptive_batching._step.batch_dependence import find_batch_dependent_module

BATCH, LENGTH, WIDTH = 3, 7, 8
Tensor = torch.Tensor


class Apply(nn.Module):
    """A module that computes ``function``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class MinusMean(Apply):
    """Depends on the other samples, without a batch normalisation."""

    def __init__(self) -> None:
        super().__init__(lambda x: x - x.mean(0, keepdim=True))


class Around(nn.Module):
    """A module that computes ``function`` with its children."""

    def __init__(self, function: Callable[..., Any], **children: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


def per_channel(norm: nn.Module) -> nn.Module:
    """A layer for [b, c, s] where the model has [b, s, c]."""
    return Around(lambda self, x: self.norm(x.transpose(1, 2)).transpose(1, 2), norm=norm)


def alike(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """The two batches with sample 0 of the first."""
    second[0] = first[0]
    return first, second


def vectors() -> tuple[Tensor, Tensor]:
    return alike(torch.randn(BATCH, LENGTH, WIDTH), torch.randn(BATCH, LENGTH, WIDTH))


def tokens() -> tuple[Tensor, Tensor]:
    return alike(torch.randint(50, (BATCH, LENGTH)), torch.randint(50, (BATCH, LENGTH)))


def found_in(*layers: nn.Module) -> str | None:
    model = nn.Sequential(*layers)
    return find_batch_dependent_module(model, model, *vectors())


def llama() -> Any:
    return llama2(
        vocab_size=50, num_layers=2, num_heads=2, num_kv_heads=2, embed_dim=16, max_seq_len=16, attn_dropout=0.5
    )


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    "layer",
    [
        nn.LayerNorm(WIDTH),
        nn.InstanceNorm1d(LENGTH, track_running_stats=True),
        nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
        nn.ReLU(inplace=True),
        Apply(lambda x: F.dropout(x, 0.5) + random.random() + np.random.rand()),
        Apply(lambda x: (x, None, {"length": x.shape[1]})),
        Apply(lambda x: None),
        Apply(lambda x: x.transpose(0, 1)),  # [s, b, d]
        Apply(lambda x: torch.view_as_complex(x.unflatten(-1, (-1, 2)))),
        Apply(lambda x: x.long()),
        Apply(lambda x: x.sum()),
        Apply(lambda x: x.masked_fill(x > 0, -torch.inf)),
        Apply(lambda x: x[:, :0]),
        Apply(torch.zeros_like),
    ],
)
def test_a_module_that_treats_each_sample_by_itself_is_not_named(layer: nn.Module) -> None:
    assert found_in(nn.Linear(WIDTH, WIDTH), layer) is None


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x - x.mean(0),
        lambda x: x.sub_(x.mean(0)),
        lambda x: torch.complex(x, x - x.mean(0)),
        lambda x: (torch.zeros_like(x), x - x.mean(0)),
        lambda x: F.scaled_dot_product_attention(*[x.transpose(0, 1)] * 3).transpose(0, 1),
        lambda x: torch.einsum("bsd,csd->bc", x, x),  # similarities, as in contrastive losses
        lambda x: (None, {"scores": x, "ranks": x.argsort(0)}),
        lambda x: torch.where(x == x.max(0).values, torch.nan, x),
    ],
)
def test_a_module_that_computes_over_the_batch_is_named(function: Callable[[Tensor], Any]) -> None:
    assert found_in(nn.Linear(WIDTH, WIDTH), Apply(function)) == "1 (Apply)"


LINEAR = nn.Linear(WIDTH, WIDTH)


def fails_inside(self: Any, x: Tensor) -> Any:
    try:
        return self.failing(x.flatten())
    except RuntimeError:
        return x - x.mean(0)


IN_OTHERS: dict[str, tuple[list[nn.Module], str | None]] = {
    "rather than those before it, after it or around it": (
        [LINEAR, nn.Sequential(LINEAR, MinusMean(), nn.LayerNorm(WIDTH)), MinusMean()], "1.1 (MinusMean)",
    ),
    "rather than its children": (
        [LINEAR, Around(lambda self, x: self.after(x - x.mean(0)), after=nn.Linear(WIDTH, WIDTH))], "1 (Around)",
    ),
    "or its parent, where samples are not in dimension 0": (
        [LINEAR, Around(
            lambda self, x: self.child(x.transpose(0, 1)).transpose(0, 1), child=Apply(lambda x: x - x.mean((0, 1)))
        ), MinusMean()], "1 (Around)",
    ),
    "or its parent, where samples and tokens are one dimension": (
        [LINEAR, Around(
            lambda self, x: self.child(x.flatten(0, 1)).view_as(x), child=Apply(lambda x: x - x.mean(0))
        ), MinusMean()], "1 (Around)",
    ),
    "each of its calls being compared with its own": (
        [Around(
            lambda self, x: self.shared(self.shared(x) + 1),
            shared=Apply(lambda x: x - x.mean(0) if (x < 0).any() else x),
        )], "0.shared (Apply)",
    ),
    "and none where both calls treat samples by themselves": (
        [Around(lambda self, x: self.shared(self.shared(x) + 1), shared=nn.ReLU())], None,
    ),
    "also around a forward that raises inside a try": (
        [LINEAR, Around(fails_inside, failing=Apply(lambda x: x.view(-1, 999)))], "1 (Around)",
    ),
    "also in checkpointing that reenters the forward": (
        [Around(
            lambda self, x: checkpoint(self.inner, x, use_reentrant=True), inner=nn.Sequential(LINEAR, MinusMean())
        )], "0.inner.1 (MinusMean)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("where", IN_OTHERS)
def test_the_module_that_computes_over_the_batch_is_named(where: str) -> None:
    layers, expected = IN_OTHERS[where]
    assert found_in(*layers) == expected
    model = Around(lambda self, x: self.before(x) - x.mean(0), before=nn.Linear(WIDTH, WIDTH))
    assert find_batch_dependent_module(model, model, *vectors()) == "model (Around)"


@pytest.mark.parametrize(
    "norm",
    [nn.BatchNorm1d(4), nn.BatchNorm2d(4), nn.SyncBatchNorm(4), nn.BatchNorm1d(4, track_running_stats=False).eval()],
)
def test_a_batch_normalisation_is_named_although_these_batches_do_not_reach_it(norm: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ModuleDict({"unused": norm}))
    expected = f"1.unused ({type(norm).__name__})"
    assert find_batch_dependent_module(model, model[0], *vectors()) == expected


def test_a_batch_normalisation_that_uses_running_statistics_is_not_named() -> None:
    assert found_in(per_channel(nn.BatchNorm1d(WIDTH)).eval()) is None


def prepared(how: str, mlp_norm: nn.Module | None = None) -> Any:
    model = llama()
    if mlp_norm is not None:
        model.layers[1].mlp_norm = mlp_norm
    if "checkpointed" in how:
        set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
    if "layers" in how:
        for layer in model.layers:
            layer.compile(backend="aot_eager")
    return torch.compile(model, backend="aot_eager") if how == "compiled" else model


PREFIXES = {
    "plain": "layers.1.",
    "checkpointed, compiled layers": "layers.1._checkpoint_wrapped_module.",
    "compiled": "_orig_mod.layers.1.",
}


@pytest.mark.parametrize("how", PREFIXES)
def test_a_language_model_with_batch_normalisation_is_found_out_and_one_without_is_not(how: str) -> None:
    norms = {"(BatchNorm1d)": per_channel(nn.BatchNorm1d(16)), "(MinusMean)": MinusMean(), "": None}
    for name, norm in norms.items():
        model = prepared(how, norm)
        found = find_batch_dependent_module(model, model, *tokens())
        inner = ".norm" if "Batch" in name else ""
        assert found == (f"{PREFIXES[how]}mlp_norm{inner} {name}" if name else None)


def test_hooks_of_others_are_part_of_what_a_module_does() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), layer)
    for register in (layer.register_forward_pre_hook, layer.register_forward_hook):
        handle = register(lambda module, args, *_: args[0] - args[0].mean(0))
        assert find_batch_dependent_module(model, model, *vectors()) == "1 (Linear)"
        handle.remove()
    assert find_batch_dependent_module(model, model, *vectors()) is None


def test_compiled_layers_are_not_compiled_again() -> None:
    model = llama()
    backend = CompileCounterWithBackend("aot_eager")
    for layer in model.layers:
        layer.compile(backend=backend)
    batches = tokens()
    model(batches[0])
    compiled = backend.frame_count
    assert compiled > 0
    assert find_batch_dependent_module(model, model, *batches) is None
    model(batches[1])
    assert backend.frame_count == compiled


def rounding(epsilon: float) -> nn.Module:
    """Rounds otherwise in each run, as experts do that get other numbers of tokens."""
    numbers = torch.Generator()
    return Apply(lambda x: x * (1 + epsilon * torch.randn(x.shape, generator=numbers)))


def test_rounding_is_no_dependence_even_where_it_sends_a_token_to_another_expert() -> None:
    route = Apply(lambda x: x * (1 + 0.5 * (x.mean(-1, keepdim=True) > 0)))
    assert found_in(*[nn.Sequential(rounding(2**-8), route) for _ in range(4)]) is None  # as in bfloat16
    assert found_in(rounding(2**-24), MinusMean()) == "1 (MinusMean)"
    assert found_in(rounding(2**-8), MinusMean()) == "model (Sequential)"  # found, if not where


def test_no_gradients_are_taken_and_none_are_lost() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    model(torch.randn(2, WIDTH)).sum().backward()
    gradient = model.weight.grad
    outputs = []
    assert find_batch_dependent_module(model, lambda batch: outputs.append(model(batch)), *vectors()) is None
    assert [output.requires_grad for output in outputs] == [False, False]
    assert model.weight.grad is gradient
    assert torch.is_grad_enabled()
