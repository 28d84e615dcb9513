from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._values import ByLength, ConfigError, Explore, Fixed, MemoryAmount, Whole


def test_defaults_are_off() -> None:
    config = AdaptiveBatchingConfig.from_mapping(None)
    assert config == AdaptiveBatchingConfig()
    assert not config.enabled and not config.probes


@pytest.mark.parametrize(
    ("use_maximum", "function", "section", "probes"),
    [
        (True, None, {}, True),
        (False, "a.b", {}, True),
        (False, "a.b", {"max_batch_size": 8}, False),
        (True, "a.b", {"max_batch_size": 8}, True),
    ],
)
def test_a_bound_makes_the_probe_needless_for_growth_alone(
    use_maximum: bool, function: str | None, section: dict[str, Any], probes: bool
) -> None:
    config = AdaptiveBatchingConfig.from_mapping(
        section, use_maximum_batch_size=use_maximum, batch_increase_function=function
    )
    assert config.enabled
    assert config.probes == probes


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1024, 1024), ("1024", 1024), ("40GiB", 40 * 2**30), ("1.5 GiB", 3 * 2**29), ("512MB", 512 * 10**6),
        (0.5, 500), ("0.9", 900), ("2%", 20), ("0", 0), (0.0, 0),
        (1e9, 10**9), ("1e9", 10**9), ("2.5e3", 2500), ("1.5e1GiB", 15 * 2**30),
    ],
)  # fmt: skip
def test_amounts_of_memory(value: Any, expected: int) -> None:
    assert MemoryAmount.parse("key", value).of(1000) == expected


@pytest.mark.parametrize("value", [True, None, "lots", "-1", -5, "1.5", "120%", "3 XiB", [], "GiB"])
def test_what_is_no_amount_of_memory_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="key="):
        MemoryAmount.parse("key", value)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"serach": "predict"}, r"adaptive_batching\.serach is unknown; did you mean 'search'\? Known: .*headroom"),
        ({"search": "fastest"}, r"search='fastest' is unknown.*Known: binary_search, power_of_two, predict"),
        ({"increase_every": "step"}, "increase_every='step' cannot be used; write epoch, or a fraction"),
        ({"increase_every": 1.5}, r"increase_every=1\.5 cannot be used"),
        ({"increase_every": 0.3}, r"increase_every=0\.3 does not divide an epoch"),
        ({"lr_scaling": "cubic"}, "lr_scaling='cubic' is unknown; Known: auto, linear, none, sqrt"),
        ({"max_lr_scale": 0.5}, r"max_lr_scale=0\.5 must be a number of at least 1"),
        ({"noise_scale_every": 0}, "noise_scale_every=0 must be a whole number"),
        ({"grow_during_warmup": "no"}, "grow_during_warmup='no' must be True or False"),
        ({"round_to_power_of_two": "yes"}, "round_to_power_of_two='yes' must be True or False"),
        ({"max_batch_size": 0}, "max_batch_size=0 must be a whole number of at least 1"),
        ({"max_batch_size": 2.5}, r"max_batch_size=2\.5 must be"),
        ({"max_batch_size": True}, "max_batch_size=True must be"),
        ({"max_batch_size": 3}, "max_batch_size=3 is below batch_size=4; raise"),
        ({"sequence_length": -1}, "sequence_length=-1 must be"),
        ({"memory_limit": "lots"}, r"memory_limit='lots' is no amount of memory; write bytes"),
        ({"memory_limit": 0}, "memory_limit=0 leaves no memory"),
        ({"headroom": "300%"}, "headroom='300%' is more than the whole device"),
        ({"report_dir": 3}, "report_dir=3 must be a path"),
        ([1], "must be a mapping"),
        ({"use_maximum_batch_size": True}, "use_maximum_batch_size is unknown"),
    ],
)
def test_a_wrong_setting_is_refused_with_key_value_and_remedy(section: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AdaptiveBatchingConfig.from_mapping(section, batch_size=4)


@pytest.mark.parametrize("value", ["yes", "True", 1, None, []])
def test_use_maximum_batch_size_is_a_boolean(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"use_maximum_batch_size=.*must be True or False"):
        AdaptiveBatchingConfig.from_mapping(None, use_maximum_batch_size=value)


@pytest.mark.parametrize("value", [3, True, ["a.b"], {"every": 1}, {"_component_": 3}])
def test_batch_increase_function_is_a_path_or_a_component(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"batch_increase_function=.*dotted path"):
        AdaptiveBatchingConfig.from_mapping(None, batch_increase_function=value)


def test_null_means_the_default() -> None:
    section = {"headroom": None, "memory_limit": None, "max_batch_size": None, "sequence_length": None}
    assert AdaptiveBatchingConfig.from_mapping(section) == AdaptiveBatchingConfig()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"micro_batch_size": "banana"}, "micro_batch_size='banana' must be a whole number, auto, explore or null"),
        ({"micro_batch_size": 0}, "micro_batch_size=0 must be a whole number of at least 1"),
        ({"search": "nope"}, "search='nope' is unknown; Known: binary_search, power_of_two, predict"),
        ({"max_batch_size": -3}, "max_batch_size=-3 must be a whole number of at least 1"),
        ({"headroom": "lots"}, "headroom='lots' is no amount of memory"),
        ({"memory_limit": "0"}, "memory_limit='0' leaves no memory"),
        ({"headroom": "100%"}, "headroom='100%' keeps all of the device free"),
        ({"headroom": 1.0}, "headroom=1.0 keeps all of the device free"),
        ({"lr_scaling": "cubic"}, "lr_scaling='cubic' is unknown"),
    ],
)
def test_settings_are_validated_however_they_are_made(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AdaptiveBatchingConfig(**fields)
    with pytest.raises(ConfigError, match=message):
        replace(AdaptiveBatchingConfig(), **fields)


@pytest.mark.parametrize(
    ("value", "parsed"), [(None, Whole()), (4, Fixed(4)), ("auto", ByLength()), ("explore", Explore())]
)
def test_a_micro_batch_size_is_parsed_and_spelled_as_in_a_config(value: Any, parsed: Any) -> None:
    config = AdaptiveBatchingConfig(micro_batch_size=value)
    assert config.micro_batch_size == parsed == replace(config).micro_batch_size
    assert str(parsed) == ("null" if value is None else str(value))
