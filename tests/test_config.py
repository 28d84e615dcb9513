from __future__ import annotations

import ast
import inspect
from dataclasses import fields, replace
from typing import Any

import pytest

from adaptive_batching import _config, growth
from adaptive_batching._config import TOP_LEVEL, AdaptiveBatchingConfig
from adaptive_batching._values import ByLength, ConfigError, Explore, Fixed, MemoryAmount, Whole, percent


def read(fields: dict[str, Any], **values: Any) -> AdaptiveBatchingConfig:
    """Settings of a config with these fields, each where it belongs."""
    section = {key: value for key, value in fields.items() if key not in TOP_LEVEL}
    values |= {key: value for key, value in fields.items() if key in TOP_LEVEL}
    return AdaptiveBatchingConfig.from_mapping(section, **values)


def test_defaults_are_off_and_null_means_the_default() -> None:
    config = AdaptiveBatchingConfig.from_mapping(None)
    assert config == AdaptiveBatchingConfig()
    assert not config.enabled and not read({"recover_from_oom": False}).enabled
    assert read({"recover_from_oom": True}).enabled
    assert read({"headroom": None, "memory_limit": None, "max_batch_size": None, "sequence_length": None}) == config


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (4096, 4096), ("8500", 8500), (24, 24 * 2**30), ("24", 24 * 2**30), ("1.5", 3 * 2**29),
        ("40GiB", 40 * 2**30), ("1.5 GiB", 3 * 2**29), ("512MB", 512 * 10**6),
        (0.5, 500), ("0.9", 900), ("2%", 20), ("0", 0), (0.0, 0),
        (1e9, 10**9), ("1e9", 10**9), ("8.5e3", 8500), ("1.5e1GiB", 15 * 2**30),
        ("24G", 24 * 2**30), ("8m", 8 * 2**20),
    ],
)  # fmt: skip
def test_amounts_of_memory(value: Any, expected: int) -> None:
    assert MemoryAmount.parse("key", value).bytes_of(1000) == expected


@pytest.mark.parametrize("value", [True, None, "lots", "-1", -5, "120%", "3 XiB", [], "GiB"])
def test_what_is_not_a_memory_size_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="key="):
        MemoryAmount.parse("key", value)


WHOLE = "must be a whole number of at least 1"
WRONG: list[tuple[str, Any, str]] = [
    *(("use_maximum_batch_size", value, "must be True or False") for value in ("yes", "True", 1, None, [True])),
    *(
        ("batch_increase_function", value, "dotted path")
        for value in (3, True, ["a"], {"every": 1}, {"_component_": 3})
    ),
    ("micro_batch_size", "banana", "must be a whole number, auto, explore or null"),
    *(("micro_batch_size", value, WHOLE) for value in (0, -2, 2.5, True)),
    *(("save_every_n_steps", value, WHOLE) for value in (0, -5, 2.5, "epoch")),
    ("search", "fastest", "is unknown; known: binary_search, power_of_two, predict"),
    ("increase_every", "step", "cannot be used; write epoch, or a fraction"),
    *(("increase_every", value, "cannot be used") for value in (1.5, 2)),
    ("increase_every", 0.3, "does not divide an epoch; write epoch, or a"),
    ("lr_scaling", "cubic", "is unknown; known: auto, linear, none, sqrt"),
    *(("max_lr_scale", value, "must be a number of at least 1") for value in (0.5, 0)),
    ("audit_every", 0, WHOLE),
    *((key, "yes", "must be True or False") for key in ("grow_during_warmup", "round_to_power_of_two")),
    *((key, 1, "must be True or False") for key in ("keep_global_batch", "recover_from_oom")),
    *(("max_batch_size", value, WHOLE) for value in (0, -3, 2.5, True, "many")),
    *(("sequence_length", value, WHOLE) for value in (-1, "long")),
    ("memory_limit", "lots", "is not a memory size; write 24GiB, 90% or bytes"),
    *(("memory_limit", value, "leaves no memory") for value in (0, "0")),
    ("memory_limit", "4B", "is 4 bytes, which leaves no memory for training; write how much it may use, such as 40GiB"),
    ("memory_limit", "500KB", "is 500000 bytes, which leaves no memory for training"),
    ("headroom", "lots", "is not a memory size"),
    ("headroom", "300%", "is more than the whole device"),
    *(("headroom", value, "keeps 100 % of the device free; write less") for value in ("100%", 1.0)),
    *(("headroom", value, "write adaptive_batching.memory_limit=40%") for value in ("60%", 0.6)),
    ("report_dir", 3, "must be a path"),
]


@pytest.mark.parametrize(("key", "value", "message"), WRONG)
def test_a_wrong_setting_is_refused_with_key_value_and_remedy_however_it_is_made(
    key: str, value: Any, message: str
) -> None:
    for make in (
        lambda: AdaptiveBatchingConfig(**{key: value}),
        lambda: replace(AdaptiveBatchingConfig(), **{key: value}),
        lambda: read({key: value}, batch_size=4),
    ):
        with pytest.raises(ConfigError) as refused:
            make()
        told = str(refused.value)
        assert told.startswith(f"{key if key in TOP_LEVEL else f'adaptive_batching.{key}'}={value!r} ")
        assert message in told and "\n" not in told


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"serach": "predict"}, r"adaptive_batching\.serach is unknown; did you mean 'search'\? Known: .*headroom"),
        ({"max_batch_size": 3}, "max_batch_size=3 is below batch_size=4; raise"),
        ([1], "must be a mapping"),
        ({"use_maximum_batch_size": True}, "belongs at the top level: write use_maximum_batch_size=True$"),
        ({"micro_batch_size": "auto"}, r"adaptive_batching\.micro_batch_size belongs .*write micro_batch_size=auto$"),
    ],
)
def test_a_wrong_section_is_refused(section: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AdaptiveBatchingConfig.from_mapping(section, batch_size=4)


@pytest.mark.parametrize(
    ("value", "parsed"), [(None, Whole()), (4, Fixed(4)), ("auto", ByLength()), ("explore", Explore())]
)
def test_a_micro_batch_size_is_parsed_and_spelled_as_in_a_config(value: Any, parsed: Any) -> None:
    config = AdaptiveBatchingConfig(micro_batch_size=value)
    assert config.micro_batch_size == parsed == replace(config).micro_batch_size
    assert str(parsed) == ("null" if value is None else str(value))


def test_types_name_every_field_and_take_what_the_pages_write() -> None:
    """``mypy`` checks the call."""
    written = AdaptiveBatchingConfig(
        micro_batch_size="auto",
        memory_limit="40GiB",
        headroom=0.05,
        increase_every=0.25,
        batch_increase_function=growth.step(),
    )
    assert written.memory_limit is not None and written.memory_limit.num_bytes == 40 * 2**30
    functions = (node for node in ast.walk(ast.parse(inspect.getsource(_config))) if isinstance(node, ast.FunctionDef))
    [definition] = [function for function in functions if function.name == "__init__"]
    assert [argument.arg for argument in definition.args.kwonlyargs] == [field.name for field in fields(written)]


@pytest.mark.parametrize(("share", "said"), [(1.0, "100 %"), (7.3, "100 %"), (0.123, "12 %"), (2.7e-4, "0.027 %")])
def test_a_share_is_written_as_people_do(share: float, said: str) -> None:
    assert percent(share) == said
