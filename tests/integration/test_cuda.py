"""What a GPU computes: losses, gradients and weights, against stock's and a CPU's. ``make test-cuda`` runs these.

Each stands alone, so that what has run when time is up counts. What needs no values is in ``test_cuda_memory.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.conftest import TuneRun, assert_close, assert_same_weights
from tests.integration.test_cuda_memory import CUDA, LIMIT
from tests.support.overrides import RECOVER, SGD
from tests.support.records import without_sizes

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(params=["math", "default"])
def attention(request: pytest.FixtureRequest) -> Iterator[str]:
    """The kernel of attention: one whose backward pass is deterministic, then what torch chooses."""
    switches = ("flash_sdp", "mem_efficient_sdp", "cudnn_sdp")
    before = {name: getattr(torch.backends.cuda, f"{name}_enabled")() for name in switches}
    for name in switches:
        getattr(torch.backends.cuda, f"enable_{name}")(request.param == "default")
    yield request.param
    for name, enabled in before.items():
        getattr(torch.backends.cuda, f"enable_{name}")(enabled)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_the_probe_leaves_no_trace_on_the_device(kind: str, attention: str, tune_run: TuneRun) -> None:
    few = [*CUDA, "max_steps_per_epoch=10", "cudnn_deterministic_mode=True"]
    stock = tune_run(kind, *few, name="stock", stock=True)
    again = tune_run(kind, *few, name="again", stock=True)
    if attention == "default" and again.metrics != stock.metrics:
        pytest.skip("torch's default attention is not deterministic here: stock does not equal itself")
    assert again.metrics == stock.metrics
    for name, fields in {"recovers": RECOVER, "probed": [*LIMIT, "adaptive_batching.max_batch_size=4"]}.items():
        ours = tune_run(kind, *few, *fields, name=name)
        assert without_sizes(ours.metrics) == stock.metrics
        assert_same_weights(ours.weights(epoch=0), stock.weights(epoch=0))


def test_cutting_by_length_on_the_device_trains_as_the_whole_batch(tune_run: TuneRun) -> None:
    common = [*CUDA, *SGD, "batch_size=16", "gradient_accumulation_steps=2", "max_steps_per_epoch=10"]
    whole = tune_run("full", *common, name="whole")
    split = tune_run("full", *common, "micro_batch_size=auto", "adaptive_batching.memory_limit=4GiB", name="split")
    assert_close(split, whole, epoch=0)
