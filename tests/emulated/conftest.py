"""Tests that run on the emulated device: ``make test-emulated`` starts pytest on it, with a CUDA build of torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import finished, launched

__all__ = ["finished", "launched"]
ON_THE_DEVICE = "EMULATED_DEVICE_MEMORY" in os.environ
GIB = 2**30


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave the folder out where pytest runs elsewhere: it has a command of its own, and nothing of it is skipped."""
    return None if ON_THE_DEVICE else True


@pytest.fixture(scope="module")
def llama_1b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of Llama 3.2 1B."""
    import torch
    from torchtune.models.llama3_2 import llama3_2_1b

    from tests.support.sparse_checkpoint import write_in_format_of_hugging_face

    folder = tmp_path_factory.mktemp("checkpoints") / "1B"
    with torch.device("meta"):
        write_in_format_of_hugging_face(folder, llama3_2_1b())
    return folder


@pytest.fixture(autouse=True)
def a_card_of_80_gib() -> Iterator[None]:
    """Give each test a whole card; what one sets holds until its end."""
    import torch

    from adaptive_batching._dry_run.device import control
    from tests.support.device_steps import in_use

    yield
    control.set_memory(80 * GIB)
    control.set_neighbour(0)
    control.set_lag(0)
    control.end_faults()
    torch.cuda.set_per_process_memory_fraction(1.0)
    in_use()  # collects garbage, and frees workspaces
    torch.cuda.empty_cache()
