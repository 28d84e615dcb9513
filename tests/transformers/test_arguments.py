"""AdaptiveArguments, from Python, a command line and TRL's YAML."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from adaptive_batching import AdaptiveBatchingConfig, ConfigError, growth
from adaptive_batching._transformers import arguments
from adaptive_batching._values import ByLength, Fixed
from adaptive_batching.transformers import AdaptiveArguments
from tests.conftest import ROOT
from tests.transformers.trainers import make_trainer, trained

WRITTEN = [
    "--use_maximum_batch_size",
    "--batch_increase_function", '{"_component_": "adaptive_batching.growth.step", "gamma": 4}',
    "--memory_limit", "2GiB", "--headroom", "3%", "--lr_scaling", "sqrt", "--no_round_to_power_of_two",
    "--max_batch_size", "64", "--recover_from_oom", "False",
]  # fmt: skip


def test_a_command_line_is_read_as_python_would_write_it() -> None:
    (read,) = transformers.HfArgumentParser(AdaptiveArguments).parse_args_into_dataclasses(WRITTEN)
    written = AdaptiveArguments(
        use_maximum_batch_size=True,
        batch_increase_function={"_component_": "adaptive_batching.growth.step", "gamma": 4},
        memory_limit="2GiB", headroom="3%", lr_scaling="sqrt", round_to_power_of_two=False, max_batch_size=64,
        recover_from_oom=False,
    )  # fmt: skip
    assert read.settings(8) == written.settings(8)
    for text, size in {"auto": ByLength(), "4": Fixed(4)}.items():
        (read,) = transformers.HfArgumentParser(AdaptiveArguments).parse_args_into_dataclasses(
            ["--micro_batch_size", text]
        )
        assert read.settings(8).micro_batch_size == size
    (read,) = transformers.HfArgumentParser(AdaptiveArguments).parse_args_into_dataclasses([])
    assert read == AdaptiveArguments() and not read.settings(8).enabled


def test_what_stands_for_arguments_is_read_as_they_are() -> None:
    written = AdaptiveArguments(micro_batch_size="auto", memory_limit="2GiB")
    assert AdaptiveArguments.of(written) is written
    assert AdaptiveArguments.of({"micro_batch_size": "auto", "memory_limit": "2GiB"}) == written
    assert AdaptiveArguments.of("auto") == AdaptiveArguments(micro_batch_size="auto")


def test_every_setting_that_a_trainer_can_have_is_an_argument() -> None:
    theirs = {field.name: field.default for field in dataclasses.fields(AdaptiveArguments)}
    ours = AdaptiveBatchingConfig()
    assert set(theirs) == set(vars(ours)) - set(arguments.ONLY_IN_RECIPES)
    assert AdaptiveArguments().settings(8) == ours, "by the same defaults"


def test_a_function_is_itself_an_increase_function(tmp_path: Path) -> None:
    trainer = trained(tmp_path, AdaptiveArguments(batch_increase_function=growth.step(gamma=2), max_batch_size=16))
    assert trainer.adaptive.schedule.sizes == [8, 16]
    assert trainer.adaptive.given["batch_increase_function"] == "adaptive_batching.growth.step"


def test_without_transformers_one_line_says_what_to_install() -> None:
    code = (
        "import importlib.util as util\nfind = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'transformers' else find(name, *rest)\n"
        "import adaptive_batching.transformers"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    expected = "ImportError: transformers is not installed; pip install '.[transformers]' in the folder of"
    assert done.stderr.splitlines()[-1].startswith(expected)


def test_trls_parser_reads_a_yaml(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed")
    (tmp_path / "config.yaml").write_text(
        f"micro_batch_size: auto\nheadroom: 5%\nper_device_train_batch_size: 2\noutput_dir: {tmp_path}\n"
    )
    config, ours = trl.TrlParser((trl.SFTConfig, AdaptiveArguments)).parse_args_and_config(
        ["--config", str(tmp_path / "config.yaml"), "--bf16", "False", "--use_cpu"]
    )
    assert config.per_device_train_batch_size == 2
    assert ours.settings(2) == AdaptiveArguments(micro_batch_size="auto", headroom="5%").settings(2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"haedroom": 1}, "adaptive has no setting 'haedroom'; did you mean 'headroom'"),
        ("all", "adaptive='all' must be 'auto', AdaptiveArguments"),
        ({"batch_increase_function": '{"gamma"'}, "is not JSON"),
        ({"micro_batch_size": "auto", "balance_ranks": "no"}, "^balance_ranks='no' must be True or"),
        ({"memory_limit": "40GiB"}, "memory_limit=40GiB has no effect by itself; set micro_batch_size='auto'"),
        ({"recover_from_oom": False}, "recover_from_oom=False has no effect by itself"),
        ({"micro_batch_size": 4, "lr_scaling": "sqrt"}, "lr_scaling=sqrt has no effect while the batch stays"),
        ({"micro_batch_size": "auto", "headroom": "90%"}, "^headroom='90%' keeps 90 % .* write memory_limit=10%"),
        ({"micro_batch_size": "explore"}, "micro_batch_size='explore' is for the torchtune recipes"),
        ({"micro_batch_size": 0}, "micro_batch_size=0 must be a whole number of at least 1"),
        ({"micro_batch_size": 4, "use_maximum_batch_size": True}, "with micro_batch_size=4 any batch runs; set one"),
        (
            {"use_maximum_batch_size": True, "max_batch_size": 4},
            "max_batch_size=4 is below per_device_train_batch_size",
        ),
        ({"save_every_n_steps": 5}, "save_every_n_steps=5 is for the torchtune recipes; in Trainer, set save_strategy"),
        ({"increase_every": 0.5}, "asked at the start of each epoch"),
        (
            {
                "batch_increase_function": {"_component_": "adaptive_batching.growth.step"},
                "keep_global_batch": True,
            },
            "keep_global_batch=True keeps what the optimizer sees, which batch_increase_function is to raise",
        ),
        ({"batch_increase_function": "nowhere.at_all"}, "cannot be imported"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(given: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        make_trainer(tmp_path, given)
    assert isinstance(caught.value, ConfigError) or "batch_increase_function" in given
