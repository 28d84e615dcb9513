"""AdaptiveArguments, from Python, a command line and TRL's YAML."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra transformers)")

from adaptive_batching import ConfigError  # noqa: E402
from adaptive_batching._values import ByLength, Fixed  # noqa: E402
from adaptive_batching.transformers import AdaptiveArguments  # noqa: E402
from tests.conftest import ROOT  # noqa: E402

WRITTEN = [
    "--use_maximum_batch_size",
    "--batch_increase_function", '{"_component_": "adaptive_batching.growth.step", "gamma": 4}',
    "--adaptive_batching", '{"memory_limit": "2GiB", "lr_scaling": "sqrt"}',
]  # fmt: skip


def test_a_command_line_is_read_as_python_would_write_it() -> None:
    (read,) = transformers.HfArgumentParser(AdaptiveArguments).parse_args_into_dataclasses(WRITTEN)
    written = AdaptiveArguments(
        use_maximum_batch_size=True,
        batch_increase_function={"_component_": "adaptive_batching.growth.step", "gamma": 4},
        adaptive_batching={"memory_limit": "2GiB", "lr_scaling": "sqrt"},
    )
    assert read.settings(8) == written.settings(8)
    for text, size in {"auto": ByLength(), "4": Fixed(4)}.items():
        (read,) = transformers.HfArgumentParser(AdaptiveArguments).parse_args_into_dataclasses(
            ["--micro_batch_size", text]
        )
        assert read.settings(8).micro_batch_size == size
    (read,) = transformers.HfArgumentParser(AdaptiveArguments).parse_args_into_dataclasses([])
    assert read == AdaptiveArguments() and not read.settings(8).enabled


def test_without_transformers_one_line_says_what_to_install() -> None:
    code = (
        "import importlib.util as util\nfind = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'transformers' else find(name, *rest)\n"
        "import adaptive_batching.transformers"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    expected = "ImportError: transformers is not installed; pip install 'adaptive-batching[transformers]'"
    assert done.stderr.splitlines()[-1] == expected


def test_trls_parser_reads_a_yaml(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed")
    (tmp_path / "config.yaml").write_text(
        "micro_batch_size: auto\nadaptive_batching: {headroom: 5%}\nper_device_train_batch_size: 2\n"
        f"output_dir: {tmp_path}\n"
    )
    config, ours = trl.TrlParser((trl.SFTConfig, AdaptiveArguments)).parse_args_and_config(
        ["--config", str(tmp_path / "config.yaml"), "--bf16", "False", "--use_cpu"]
    )
    assert config.per_device_train_batch_size == 2
    assert ours.settings(2) == AdaptiveArguments(None or False, None, "auto", {"headroom": "5%"}).settings(2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"adaptive_batching": {"haedroom": 1}}, "adaptive_batching.haedroom is unknown; did you mean 'headroom'"),
        ({"adaptive_batching": '{"headroom"'}, "is not JSON"),
        ({"adaptive_batching": {"balance_ranks": "no"}}, "adaptive_batching.balance_ranks='no' must be True or"),
        ({"adaptive_batching": {"balance_rank": False}}, "balance_rank is unknown; did you mean 'balance_ranks'"),
        ({"micro_batch_size": "explore"}, "micro_batch_size='explore' is for the torchtune recipes"),
        ({"micro_batch_size": 0}, "micro_batch_size=0 must be a whole number of at least 1"),
        ({"micro_batch_size": 4, "use_maximum_batch_size": True}, "with micro_batch_size=4 any batch runs; set one"),
        ({"adaptive_batching": {"max_batch_size": 4}}, "max_batch_size=4 is below per_device_train_batch_size=8"),
        (
            {"adaptive_batching": {"noise_scale_every": 5}},
            "noise_scale_every=5 is for the torchtune recipes",
        ),
        ({"adaptive_batching": {"increase_every": 0.5}}, "asked at the start of each epoch"),
        (
            {
                "batch_increase_function": {"_component_": "adaptive_batching.growth.step"},
                "adaptive_batching": {"keep_global_batch": True},
            },
            "keep_global_batch=True keeps what the optimizer sees, which batch_increase_function is to raise",
        ),
        ({"batch_increase_function": "nowhere.at_all"}, "cannot be imported"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    from tests.transformers.trainers import make_trainer

    with pytest.raises(ValueError, match=said) as caught:
        make_trainer(tmp_path, AdaptiveArguments(**given))
    assert isinstance(caught.value, ConfigError) or "batch_increase_function" in given
