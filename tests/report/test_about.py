"""What a record says of a run: its config, without secrets."""

from __future__ import annotations

from typing import Any

import pytest

from adaptive_batching._report.about import about as facts_of

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
