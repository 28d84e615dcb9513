"""Every decoder that torchtune builds computes a row of samples as it computes each of them, or is known not to."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchtune.models
from torch import nn
from torchtune.data import padded_collate_sft
from torchtune.modules import TransformerDecoder
from torchtune.modules.loss import CEWithChunkedOutputLoss

from adaptive_batching._attention import SampleBounds
from adaptive_batching._torchtune.stock.end_to_end import RowBounds, RowSeams, why_not_in_rows
from adaptive_batching._torchtune.stock.losses import NextToken

ARGUMENTS: dict[str, Any] = {
    "vocab_size": 97, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "embed_dim": 32,
    "intermediate_dim": 48, "max_seq_len": 40, "num_classes": 97, "fusion_interval": 1, "num_special_tokens": 2,
    "encoder_max_seq_len": 16, "lora_attn_modules": ["q_proj", "v_proj", "output_proj"], "apply_lora_to_mlp": True,
    "lora_rank": 2, "lora_alpha": 4.0, "sliding_window_size": 6, "decoder_trainable": "lora",
    "encoder_trainable": "frozen", "fusion_trainable": "lora", "decoder_lora": True, "fusion_lora": True,
}  # fmt: skip
LENGTHS = (9, 30, 1, 17)


def builders() -> Iterator[tuple[str, Callable[..., nn.Module]]]:
    for family in pkgutil.iter_modules(torchtune.models.__path__):
        name = f"torchtune.models.{family.name}._component_builders"
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:  # it has those of another family
            continue
        for function, make in inspect.getmembers(module, inspect.isfunction):
            of_here = make.__module__ == name and function.removeprefix("lora_").startswith(family.name.split("_")[0])
            if of_here and not any(part in function for part in ("mlp", "attention", "encoder", "head")):
                yield function, make


def build(make: Callable[..., nn.Module]) -> nn.Module:
    parameters = inspect.signature(make).parameters
    return make(**{name: value for name, value in ARGUMENTS.items() if name in parameters})


def gradient(model: nn.Module, run: Callable[[], torch.Tensor]) -> torch.Tensor:
    model.zero_grad()
    run().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


DECODERS = dict(builders())


@pytest.mark.parametrize("name", DECODERS)
def test_a_row_has_the_gradient_of_its_samples(name: str) -> None:
    torch.manual_seed(0)
    model = build(DECODERS[name])
    assert isinstance(model, TransformerDecoder)
    for parameter in model.parameters():  # an adapter begins with zeros
        nn.init.normal_(parameter, std=0.2)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    assert why_not_in_rows([model]) is None
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items()) and model.training
    bounds, predicting = SampleBounds(LENGTHS), torch.rand(sum(LENGTHS)).argsort()[: sum(LENGTHS) // 3].sort().values
    samples = [torch.randint(97, (1, length)) for length in LENGTHS]
    weights = torch.zeros(1, sum(LENGTHS), model.output(torch.zeros(1, 1, 32)).shape[-1])
    weights[:, predicting] = torch.randn_like(weights[:, predicting])

    def alone() -> torch.Tensor:
        parts = zip(samples, weights.split(LENGTHS, 1), strict=True)
        return torch.stack([(model(one) * weight).sum() for one, weight in parts]).sum()

    def in_row(bounds: SampleBounds, weights: torch.Tensor) -> torch.Tensor:
        row = model(torch.cat(samples, 1), mask=bounds, input_pos=bounds.positions())
        return (row * weights).sum()

    expected, seams = gradient(model, alone), RowSeams([model])
    with seams.open():
        of_all = gradient(model, lambda: in_row(bounds, weights))
        of_some = gradient(model, lambda: in_row(RowBounds(LENGTHS, predicting), weights[:, predicting]))
        assert torch.equal(gradient(model, alone), expected), "what is no row is as it was"
    for found in (of_all, of_some):
        assert float((found - expected).norm()) <= 1e-6 * float(expected.norm())
    assert torch.equal(gradient(model, alone), expected)


def test_a_batch_of_packs_is_computed_as_before_where_rows_are_taken() -> None:
    torch.manual_seed(0)
    model = build(DECODERS["llama3"])
    packs = torch.randint(97, (2, 12))
    positions = torch.stack([torch.arange(12), torch.cat([torch.arange(5), torch.arange(7)])])
    expected = model(packs, input_pos=positions)
    with RowSeams([model]).open():
        assert torch.equal(model(packs, input_pos=positions), expected)


@pytest.mark.parametrize("num_targets", [1, 5, 13, 29])
def test_a_row_makes_logits_of_targets_alone_and_as_many_chunks_as_other_ranks(num_targets: int) -> None:
    """A sharded output layer is gathered for each chunk, from all ranks."""
    torch.manual_seed(0)
    model: Any = build(DECODERS["llama3"])
    model.set_num_output_chunks(4)
    objective = NextToken(padded_collate_sft, CEWithChunkedOutputLoss(4), contextlib.nullcontext(), num_chunks=4)
    labels = [3] * num_targets
    samples = [
        {"tokens": [1] * 40, "labels": [5] + [-100] * (39 - num_targets) + labels},
        {"tokens": [2] * 7, "labels": [-100] * 7},
    ]
    sizes = list[int]()
    model.output.register_forward_hook(lambda module, inputs, output: sizes.append(output.shape[1]))
    expected, _ = objective.loss(model, objective.collate(samples), None)
    sizes.clear()
    with RowSeams([model]).open():
        loss, _ = objective.loss(model, objective.lay(samples), None)
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        assert sum(sizes) == num_targets
        sizes.clear()
        objective.equalize_collectives()
        loss, _ = objective.loss(model, objective.lay(samples), None)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert len(sizes) == 4 and sum(sizes) <= num_targets + 6


def test_all_of_torchtunes_families_are_there() -> None:
    families = {"llama2", "llama3", "llama3_1", "llama3_2", "mistral", "phi3", "gemma", "gemma2", "qwen2"}
    assert families <= {*DECODERS} and {f"lora_{family}" for family in families} <= {*DECODERS}


class Mixing(nn.Module):
    """A layer that takes a running mean over the tokens of its row, as recurrences do."""

    def forward(self, x: torch.Tensor, **others: Any) -> torch.Tensor:
        return x + x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


def test_what_carries_one_sample_over_into_the_next_is_found() -> None:
    torch.manual_seed(0)
    model: Any = build(DECODERS["llama2"])
    model.layers.append(Mixing())
    why = why_not_in_rows([model])
    assert why is not None and "has samples of a row change those after them" in why
    model.layers = model.layers[-1:]
    model.layers[0].caches_are_enabled = lambda: False
    why = why_not_in_rows([model])
    assert why is not None and "has an attention of its own" in why
