"""Plans of tensor parallelism: a device holds and computes its part, as a rank of a real group does.

As a program it is such a rank, and prints the most bytes that real steps have in use beyond those at rest:
torchrun --nproc_per_node 2 -m tests.torchtune.test_tensor_parallel <inputs> <directory> <override> ...
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
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
from tests.conftest import ROOT
from tests.torchtune.test_meta_setup import BATCH, LENGTH, config, predicted_bytes, step_of, transient_bytes

PLAN = "tensor_parallel_plan._component_=torchtune.models.llama3.base_llama_tp_plan"
TWO = ["tensor_parallel_dim=2", PLAN, "clip_grad_norm=null"]


def test_a_real_step_takes_what_is_predicted(inputs: Path, tmp_path: Path) -> None:
    """Two ranks share each layer."""
    ranks = 2
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    done = subprocess.run(
        [sys.executable, *launch, "-m", __name__, str(inputs), str(tmp_path), *TWO],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    said = re.search(r"transient bytes: (\d+)", done.stdout)
    assert said, done.stdout[-2000:] + done.stderr[-2000:]
    with on_devices(ranks):
        host, _ = set_up("full_finetune_distributed", config("full", *TWO), Data(LENGTH, 50), ranks)
        predicted = predicted_bytes(trace_step(step_of(host)))
    assert predicted == pytest.approx(int(said[1]), rel=0.06)  # gloo's threads hold an activation or two for longer


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


def main(inputs: str, directory: str, *overrides: str) -> None:
    from recipes.full_finetune_distributed import FullFinetuneRecipeDistributed

    cfg = config("full", *overrides, inputs=Path(inputs), out=Path(directory))
    made = FullFinetuneRecipeDistributed(cfg)
    made.setup(cfg)
    # The threads of gloo hold a tensor for as long as they happen to need it, which can only add to what a step takes.
    step = training_step(made._session.host, {"tokens": [1] * LENGTH, "labels": [1] * LENGTH}, accumulates=False)
    taken = min(transient_bytes(step) for _ in range(8))
    if dist.get_rank() == 0:
        print(f"transient bytes: {taken}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
