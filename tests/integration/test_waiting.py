"""How often a step waits for the device: once for each value that is read back from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch.utils._python_dispatch import TorchDispatchMode

from adaptive_batching import _snapshot
from adaptive_batching.torchtune import load_stock, recipe
from tests.conftest import QUICKSTART, small_run

stock = load_stock("full_finetune_single_device")


class Reads(TorchDispatchMode):
    """Counts what reads values from tensors, or has a shape that depends on them."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_read = func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        self.count += is_read and not _snapshot.rehearsing  # an audit is no step
        return func(*args, **(kwargs or {}))


def reads_of_training(recipe_class: type[Any], inputs: Path, output_dir: Path, **fields: Any) -> int:
    """Values read in eight steps of training, and in what comes before the first of them."""
    small = small_run(inputs, output_dir, "batch_size=8", "epochs=1", "dataset.split=train[:64]", "clip_grad_norm=1.0")
    cfg: Any = OmegaConf.merge(OmegaConf.load(QUICKSTART / "full_single_device.yaml"), OmegaConf.from_dotlist(small))
    cfg.update(adaptive_batching={"memory_limit": "8GiB"}, **fields)
    made = recipe_class(cfg)
    made.setup(cfg)
    made.save_checkpoint = lambda epoch: None
    with Reads() as reads:
        made.train()
    assert made.global_step == 8
    return reads.count


@pytest.mark.parametrize("micro_batch_size", [None, 2, "auto"])
def test_a_clean_step_waits_for_the_device_no_more_often_than_stock(
    micro_batch_size: int | str | None, inputs: Path, tmp_path: Path
) -> None:
    theirs = reads_of_training(stock.FullFinetuneRecipeSingleDevice, inputs, tmp_path / "stock")
    assert theirs >= 8, "the loss of each step is shown"
    ours = reads_of_training(
        recipe("full_finetune_single_device"), inputs, tmp_path / "ours", micro_batch_size=micro_batch_size
    )
    assert ours <= theirs
