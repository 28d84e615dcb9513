"""Check a config with its stock recipe, without a device, weights or data; and samples that stand in for the data."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch.distributed.device_mesh import init_device_mesh
from torchtune import training, utils

from adaptive_batching._torchtune.stock import images
from adaptive_batching._torchtune.stock.data import Sample
from adaptive_batching._torchtune.stock.loading import load_stock, stock_recipe
from adaptive_batching._torchtune.stock.losses import ANSWERS


@dataclass(frozen=True)
class Data:
    """Data that stand in for others: samples of one length, each with an image where the model takes one."""

    length: int  # tokens of a sample
    samples: int
    packed: bool = False
    pairs: bool = False  # of answers, both of that length
    image: images.Image | None = None

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Sample:
        tokens = [1] * self.length
        if self.pairs:
            return {f"{kind}_{part}": list(tokens) for kind in ANSWERS for part in ("input_ids", "labels")}
        sample: Sample = {"tokens": tokens, "labels": list(tokens)}
        if self.packed:
            sample = {key: torch.tensor(value) for key, value in sample.items()}
            sample |= {"input_pos": torch.arange(self.length), "seq_lens": torch.tensor([self.length])}
        return sample if self.image is None else sample | self.image.fields(self.length)


def make_on_paper(recipe: str, cfg: DictConfig) -> None:
    """Make a stock recipe, not set up; what stock raises about the config comes through."""
    devices = max(2, cfg.get("tensor_parallel_dim", 1)) if recipe.endswith("distributed") else 1
    with torch.random.fork_rng(devices=[]), _quiet(), _on_devices(devices), _without_device(load_stock(recipe)):
        stock_recipe(recipe)(copy.deepcopy(cfg))


@contextlib.contextmanager
def _on_devices(count: int) -> Iterator[None]:
    """Have a process group of ``count`` ranks inside, of which this process is the first and only one."""
    if count == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Have nothing logged inside but errors."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _without_device(stock: ModuleType) -> Iterator[None]:
    """Replace, inside, what making a recipe asks of devices and of other ranks."""
    replaced: list[tuple[Any, str, Any]] = [
        (training, "get_dtype", lambda dtype, device=None: training.precision.PRECISION_STR_TO_DTYPE[dtype or "fp32"]),
        (utils, "get_device", lambda device=None: torch.device(device or "cuda")),
        (stock, "init_process_group", lambda *args, **kwargs: None),
        (stock, "init_device_mesh", lambda _, *args, **kwargs: init_device_mesh("cpu", *args, **kwargs)),
        (dist, "barrier", lambda *args, **kwargs: None),
    ]
    with images.without_torchvision(), contextlib.ExitStack() as stack:
        for owner, name, replacement in replaced:
            if owner is not stock or hasattr(stock, name):
                stack.enter_context(mock.patch.object(owner, name, replacement))
        yield
