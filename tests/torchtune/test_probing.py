"""When a stored probe may be used again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torchtune
from omegaconf import OmegaConf

from adaptive_batching._probe.sizing import size_up
from adaptive_batching._probe.stored_probe import settings_of_memory
from adaptive_batching._step.forward_times import ForwardTimes
from adaptive_batching._torchtune.train.probing import CacheInputs
from adaptive_batching._torchtune.train.settings import read_settings

STOCK = Path(torchtune.__file__).parent.parent / "recipes" / "configs" / "llama3_1" / "8B_full.yaml"


def changed(**settings: Any) -> bool:
    cfg, other = OmegaConf.load(STOCK), OmegaConf.load(STOCK)
    for key, value in settings.items():
        OmegaConf.update(other, key.replace("__", "."), value, force_add=True)

    def depends_on(cfg: Any) -> dict[str, Any]:
        settings = read_settings(cfg)
        request = size_up(settings, batch_size=2, accumulation=1, samples=64).request
        return {**CacheInputs(cfg).config(), **settings_of_memory(settings, request)}

    return depends_on(cfg) != depends_on(other)


MATTER: list[dict[str, Any]] = [
    {"fsdp_cpu_offload": True}, {"fsdp_reshard_after_forward": False}, {"custom_sharded_layers": ["output"]},
    {"ac_mode": "selective"}, {"ac_option": 2}, {"tensor_parallel_dim": 2}, {"optimizer__fused": False},
    {"model___component_": "torchtune.models.llama3_2.llama3_2_1b"}, {"enable_activation_offloading": True},
    {"enable_async_checkpointing": True}, {"dataset__packed": True}, {"a_setting_of_next_year": 1},
    {"micro_batch_size": 1}, {"micro_batch_size": "auto"}, {"adaptive_batching": {"memory_limit": "40GiB"}},
    {"adaptive_batching": {"headroom": "1%"}}, {"adaptive_batching": {"search": "binary_search"}},
]  # fmt: skip
DO_NOT: list[dict[str, Any]] = [
    {"output_dir": "/elsewhere"}, {"seed": 3}, {"optimizer__lr": 1e-4}, {"epochs": 7}, {"resume_from_checkpoint": True},
    {"checkpointer__checkpoint_files": ["another"]}, {"metric_logger__log_dir": "/elsewhere"}, {"batch_size": 16},
    {"adaptive_batching": {"report_dir": "/elsewhere"}},
]  # fmt: skip


@pytest.mark.parametrize(("setting", "matters"), [(each, each in MATTER) for each in (*MATTER, *DO_NOT)], ids=str)
def test_what_may_change_what_training_takes_and_nothing_else_calls_for_another_probe(
    setting: dict[str, Any], matters: bool
) -> None:
    assert changed(**setting) == matters


@pytest.mark.parametrize(
    ("measured", "enough"),
    [
        # Of 10 ms and 20 ms for each sample, with a tenth of the first measurement for what that may be off by.
        ([(1, 0.030), (2, 0.050)], 33),
        ([(1, 0.9), (1, 0.030), (2, 0.050), (2, 0.2)], 33),  # of several the fastest counts
        ([(1, 0.020), (2, 0.042)], 5),  # a time that rises faster than the samples has no fixed part
        ([(1, 0.030), (15, 0.310), (16, 0.330)], 33),  # sizes that are far apart tell most
        ([(1, 0.030), (2, 0.033)], None),  # time hardly rises: the device is not filled
        ([(1, 0.030)], None),
    ],
)
def test_forwards_are_large_enough_where_larger_ones_gain_less_than_a_fiftieth(
    measured: list[tuple[int, float]], enough: int | None
) -> None:
    times = ForwardTimes()
    for samples, seconds in measured:
        times.note(samples, seconds)
    assert times.enough() == enough
    assert times.is_worth(2, 33), "how many samples are left is not known"


@pytest.mark.parametrize(("samples_left", "is_worth"), [(600, False), (700, True)])
def test_trials_are_worth_what_the_rest_of_the_run_gains_by_them(samples_left: int, is_worth: bool) -> None:
    times = ForwardTimes(samples_left)
    times.note(1, 0.030)
    times.note(2, 0.050)
    # Three steps of two forwards of 0.013 + 33 x 0.02 s, 4.0 s; for each sample left, 0.013 x (1/2 - 1/33) s.
    assert times.is_worth(2, 33) == is_worth
