"""The config to paste: valid, complete, and without anything left to look for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._probe.sizing import size_up
from adaptive_batching._report.about import about as facts_of
from adaptive_batching._report.configs import snippet
from adaptive_batching._report.events import read_runs
from adaptive_batching._report.page import write_page
from adaptive_batching._report.record import Report
from adaptive_batching._torchtune.names import stock_config
from tests.support.html import read_page
from tests.support.runs import CONFIG, about, write_run

FUNCTION = {"_component_": "adaptive_batching.growth.staged", "stages": {0: 4, 2: 8}}


def pasted(tmp_path: Path, *, explores: bool = False, **config: Any) -> tuple[dict[str, Any], str, str]:
    """What is pasted after a run with this config, read as YAML; the YAML; and what it spares."""
    report = Report(tmp_path, about=about(**config))
    write_run(report)
    if not explores:
        lines = report.path.read_text().splitlines(keepends=True)
        report.path.write_text("".join(line for line in lines if '"exploration"' not in line))
    [run] = read_runs([tmp_path])
    found = snippet(run)
    assert found is not None
    values: Any = OmegaConf.to_container(OmegaConf.create(found[0]))
    return values, *found


def settings(values: dict[str, Any]) -> AdaptiveBatchingConfig:
    values = dict(values)
    return AdaptiveBatchingConfig.from_mapping(values.pop("adaptive_batching", None), **values)


LIMIT = {"memory_limit": "1.5GiB"}
ONE_SIZE = {"batch_size": 4, "use_maximum_batch_size": False}
OF_NO_GROWTH = {"use_maximum_batch_size": False, "batch_increase_function": None}


@pytest.mark.parametrize(
    ("config", "expected", "spared"),
    [
        ({"batch_increase_function": None, "batch_size": 2}, {**ONE_SIZE, "adaptive_batching": LIMIT},
         "needs no probe"),
        ({"batch_increase_function": {"_component_": None, "every": 1}}, {**ONE_SIZE, "adaptive_batching": LIMIT},
         "needs no probe"),  # as a command line takes a function away
        ({"batch_increase_function": FUNCTION},
         {**ONE_SIZE, "batch_increase_function": FUNCTION, "adaptive_batching": {**LIMIT, "max_batch_size": 8}},
         "needs no probe"),
        ({"batch_increase_function": FUNCTION, "batch_size": 16},
         {**ONE_SIZE, "batch_size": 8, "batch_increase_function": FUNCTION,
          "adaptive_batching": {**LIMIT, "max_batch_size": 8}}, "needs no probe"),
        ({"micro_batch_size": "explore", **OF_NO_GROWTH},
         {**ONE_SIZE, "micro_batch_size": 4, "adaptive_batching": LIMIT}, "explores nothing"),
    ],
    ids=["the largest batch", "function taken away", "growth", "growth from more than fits", "explored"],
)  # fmt: skip
def test_what_was_found_is_taken(config: dict[str, Any], expected: dict[str, Any], spared: str, tmp_path: Path) -> None:
    values, yaml, said = pasted(tmp_path, explores="micro_batch_size" in config, **config)
    found = settings(values)
    assert values == expected and not size_up(found, batch_size=1, accumulation=1, samples=64).probes
    assert found.grows == ("batch_increase_function" in expected)
    assert said == f"With these settings the next run {spared}."
    assert ("was 2" in yaml) == (config.get("batch_size") == 2)


@pytest.mark.parametrize(
    "config",
    [
        {"micro_batch_size": "auto"},
        {"adaptive_batching": {"grow_beyond_memory": True}},
        {"adaptive_batching": {"keep_global_batch": True}},
    ],
)
def test_what_has_to_know_the_memory_is_left_as_it_is(config: dict[str, Any], tmp_path: Path) -> None:
    values, _, spares = pasted(tmp_path, **config)
    before = {**about()["config"], **config}
    assert settings(values) == settings({key: before[key] for key in values})
    assert spares.startswith("Nothing to change: the probe's result")


def test_what_was_not_probed_is_not_said_to_be_kept(tmp_path: Path) -> None:
    report = Report(tmp_path, about=about())
    report.maximum(16, "max_batch_size=16")
    write_run(report, range(1), 1, all_there_is=False)
    page = read_page(write_page([tmp_path]))
    assert "Nothing to change: these are the settings of this run" in page.words["config"]
    assert page.facts["Largest that fits"] == "not probed" and "at most 16: max_batch_size=16" in page.words["summary"]


@pytest.mark.parametrize(
    "text", ["yes", "1e3", "on", "a: b", "#x", "", "90%", "1.5GiB", "pkg.module.function", "null", "ü"]
)
def test_text_stays_text(text: str, tmp_path: Path) -> None:
    values, _, _ = pasted(tmp_path, adaptive_batching={"report_dir": text})
    assert values["adaptive_batching"]["report_dir"] == text


def test_a_record_that_does_not_hold_its_config_has_nothing_to_paste(tmp_path: Path) -> None:
    write_run(Report(tmp_path))
    [run] = read_runs([tmp_path])
    assert snippet(run) is None


def test_what_differs_from_stocks_config_of_the_same_name_is_shown(tmp_path: Path) -> None:
    stock = {**CONFIG, "output_dir": "/tmp/stock", "batch_size": 2, "log": "/tmp/stock/log", "seed": None}
    write_run(Report(tmp_path, about={**about(log="outputs/run/log"), "stock": {"name": "a/b", "config": stock}}))
    page = read_page(write_page([tmp_path]))
    assert page.tables["config"] == [[["", "torchtune's", "this run's"], ["batch_size", "2", "4"],
                                      ["seed", "null", "not set"]]]  # fmt: skip
    assert "What differs from torchtune's a/b (2)" in page.words["config"]


@pytest.mark.parametrize(
    ("path", "stock"),
    [
        ("recipes/configs/llama3_2/1B_lora_single_device.yaml", "llama3_2/1B_lora_single_device"),
        ("recipes/configs/llama3_1/8B_lora_single_device_adaptive.yaml", "llama3_1/8B_lora_single_device"),
        ("my/70B_qlora.yaml", None),  # llama3_3 has one and llama3_1 as well
        ("llama3_3/70B_qlora.yaml", "llama3_3/70B_qlora"),
        ("my/0.6B_other.yaml", None),
        ("quickstart/full_single_device.yaml", None),
        ("", None),
    ],
)
def test_stocks_config_is_found_by_the_name_of_a_file(path: str, stock: str | None) -> None:
    assert stock_config(Path(path)) == stock


SECRETS: list[Any] = [
    {"api_key": "x"}, {"WANDB_API_KEY": "x"}, {"hubToken": "x"}, {"hf_token": "x"}, {"client-secret": "x"},
    {"Password": "x"}, {"db": {"passwd": "x"}}, {"loggers": [{"kind": 1, "apikey": "x"}]}, {"secrets": ["x", "x"]},
    {"token": {"value": "x", "kind": ["x"]}}, {"use_auth_token": "x"}, {"tokenizer": {"path": 3, "token": "x"}},
]  # fmt: skip
NO_SECRETS: dict[str, Any] = {
    "tokenizer": {"_component_": "torchtune.models.llama3.llama3_tokenizer", "path": "/a/tokenizer.model"},
    "tokenizer_name_or_path": "gpt2", "max_tokens": 512, "max_new_tokens": 8, "key_value_heads": 2, "pad_token_id": 0,
    "pad_token": "!", "eos_token": "<|im_end|>", "image_token": "[IMG]", "hub_token": None, "use_auth_token": True,
    "special_tokens": ["<a>"], "keywords": "a, b", "include_num_input_tokens_seen": "no", "api_key": "",
    "shuffle": True, "loss": {"num_output_chunks": 8}, "token": "<HUB_TOKEN>",
}  # fmt: skip


@pytest.mark.parametrize("config", SECRETS, ids=str)
def test_what_keys_of_any_case_name_as_secret_is_left_out_of_the_record(config: Any) -> None:
    found = facts_of("recipe", "model", config, device="cpu", ranks=1, packages=())["config"]
    assert "'x'" not in str(found) and "(masked)" in str(found) and found.keys() == config.keys()


def test_keys_and_tokens_that_are_no_secret_stay() -> None:
    assert facts_of("recipe", "model", NO_SECRETS, device="cpu", ranks=1, packages=())["config"] == NO_SECRETS
