"""Offloaded activations in a trace, against torchtune's own context with streams that do nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torchtune.training import OffloadActivations

from adaptive_batching._torchtune import objective
from adaptive_batching._torchtune.on_paper import Data, set_up
from adaptive_batching._torchtune.stand_ins import SMALLEST
from adaptive_batching._trace.recorder import Recorder
from adaptive_batching._trace.traced_step import TracedStep
from tests.torchtune.test_on_paper import LENGTH, config, traced


@contextlib.contextmanager
def without_cuda() -> Iterator[None]:
    """Let torchtune's context run on the host: its copies there take no memory of the device."""
    empty_like, to = torch.empty_like, torch.Tensor.to

    def on_host(tensor: torch.Tensor, *, pin_memory: bool | None = None, **options: Any) -> torch.Tensor:
        if pin_memory is None:
            return empty_like(tensor, **options)
        Recorder.fused = True
        try:
            return empty_like(tensor)
        finally:
            Recorder.fused = False

    def brought(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return empty_like(tensor) if args == ("cuda",) else to(tensor, *args, **options)

    with (
        mock.patch.object(torch.cuda, "default_stream"),
        mock.patch.object(torch.cuda, "Stream"),
        mock.patch.object(torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
        mock.patch.object(torch, "empty_like", on_host),
        mock.patch.object(torch.Tensor, "to", brought),
        mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None),
    ):
        yield


class Real(OffloadActivations):
    """torchtune's, with the same smallest activation."""

    def __init__(self) -> None:
        super().__init__(min_offload_size=SMALLEST)


def trace(*overrides: str, monkeypatch: pytest.MonkeyPatch, by_torchtune: bool) -> TracedStep:
    levers = ["enable_activation_offloading=True", "enable_activation_checkpointing=True"]
    cfg = config("full", *levers, *overrides)
    cfg.device = "cuda"
    host, _ = set_up("full_finetune_single_device", cfg, Data(LENGTH, 50))
    if not by_torchtune:
        return traced(host, 1)
    with without_cuda():
        monkeypatch.setattr(objective, "TracedOffloading", Real)
        host.objective._activations = Real()  # type: ignore[attr-defined]
        return traced(host, 1)


@pytest.mark.parametrize(
    "overrides",
    [["model.num_layers=6"], ["model.num_layers=3", "dtype=bf16", "compile=True"]],
    ids=["more than stay", "compiled"],
)
def test_a_trace_keeps_on_the_device_what_torchtune_keeps(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = (trace(*overrides, monkeypatch=monkeypatch, by_torchtune=flag) for flag in (False, True))
    for size in (4, 50, 1000):
        assert ours.curve.peak_bytes(size) == theirs.curve.peak_bytes(size)
        assert ours.at(size).at_peak() == theirs.at(size).at_peak()


def test_at_any_length_the_same_activations_move_at_both_traced_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 48 tokens, 2 samples have fewer than the 1024 bytes from which torchtune moves a tensor, and 3 have more."""
    assert trace(monkeypatch=monkeypatch, by_torchtune=False).is_uniform
