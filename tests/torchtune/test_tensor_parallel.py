"""Plans of tensor parallelism: a device holds and computes its part, as a rank of a real group does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from adaptive_batching._caching_allocator import workspace_bytes
from adaptive_batching._plan import MemoryEstimate
from adaptive_batching._torchtune.plan.meta_setup import Data, on_devices, set_up
from adaptive_batching._torchtune.plan.planning import NotPlannedError, PlanRequest, sketch
from adaptive_batching._torchtune.train.training_step import training_step
from adaptive_batching._trace.trace import trace_step
from tests.support.ranks import run_ranks
from tests.torchtune.test_meta_setup import BATCH, LENGTH, config, predicted_bytes, step_of, transient_bytes

PLAN = "tensor_parallel_plan._component_=torchtune.models.llama3.base_llama_tp_plan"
TWO = ["tensor_parallel_dim=2", PLAN, "clip_grad_norm=null"]


def test_a_real_step_takes_what_is_predicted(inputs: Path, tmp_path: Path) -> None:
    """Two ranks share each layer."""
    [taken, _] = run_ranks(most_bytes_taken, inputs, tmp_path / "out", folder=tmp_path)
    with on_devices(2):
        host, _ = set_up("full_finetune_distributed", config("full", *TWO), Data(LENGTH, 50), 2)
        predicted = predicted_bytes(trace_step(step_of(host)))
    assert predicted == pytest.approx(taken, rel=0.06)  # gloo's threads hold an activation or two for longer


def most_bytes_taken(inputs: Path, output_dir: Path) -> int:
    """Return the most bytes that real steps of this rank have in use beyond those at rest."""
    from recipes.full_finetune_distributed import FullFinetuneRecipeDistributed

    cfg = config("full", *TWO, inputs=inputs, out=output_dir)
    made = FullFinetuneRecipeDistributed(cfg)
    made.setup(cfg)
    # The threads of gloo hold a tensor for as long as they happen to need it, which can only add to what a step takes.
    step = training_step(made._session.host, {"tokens": [1] * LENGTH, "labels": [1] * LENGTH}, accumulates=False)
    taken = min(transient_bytes(step) for _ in range(8))
    dist.barrier()
    dist.destroy_process_group()
    return taken


def need(*overrides: str, devices: int = 4) -> MemoryEstimate:
    cfg: Any = config("full", "clip_grad_norm=null", *overrides)
    return sketch(PlanRequest("full_finetune_distributed", cfg, devices), LENGTH).forecast.need(BATCH)


def test_activations_are_shared_where_layers_are_and_weights_in_either_case() -> None:
    shared, sharded = need(*TWO), need()
    assert shared.resting_bytes == pytest.approx(sharded.resting_bytes, rel=0.01)
    assert shared.kinds["activations"] < 0.8 * sharded.kinds["activations"]


def test_a_device_of_more_takes_less() -> None:
    four, eight = need(*TWO, devices=4), need(*TWO, devices=8)
    handles = 2 * workspace_bytes()  # of cuBLAS, which are whole on each
    assert eight.resting_bytes - handles == pytest.approx((four.resting_bytes - handles) / 2, rel=0.1)
    assert eight.peak_bytes < four.peak_bytes


@pytest.mark.parametrize(
    ("override", "devices", "remedy"),
    [("clip_grad_norm=1.0", 4, "set clip_grad_norm=null"), ("seed=1", 2, "set optimizer.foreach=False")],
)
def test_what_torch_does_not_train_is_refused_with_the_remedy(override: str, devices: int, remedy: str) -> None:
    with pytest.raises(NotPlannedError, match=remedy):
        need(*TWO, override, devices=devices)


def test_without_foreach_layers_can_be_shared_by_all_devices() -> None:
    assert need(*TWO, "optimizer.foreach=False", devices=2).peak_bytes > need(*TWO, devices=4).peak_bytes
