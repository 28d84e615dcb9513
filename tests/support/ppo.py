"""Runs of PPO through ``tune run``, on small random models."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from torch import nn
from torchtune.models.llama2 import llama2_classifier
from torchtune.rlhf.utils import reward_tune_to_hf

from tests.conftest import ARCHITECTURE, Run, _main

GENERATED = 6


def save_reward_model(inputs: Path) -> None:
    """Make a checkpoint of a reward model, which the value model starts from as well, if there is none yet."""
    folder = inputs / "reward"
    if (folder / "model.safetensors").exists():
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = llama2_classifier(num_classes=1, **ARCHITECTURE)  # type: ignore[arg-type]
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.05)
    folder.mkdir(exist_ok=True)
    shutil.copy(inputs / "model" / "config.json", folder)
    heads, kv_heads = ARCHITECTURE["num_heads"], ARCHITECTURE["num_kv_heads"]
    weights = reward_tune_to_hf(model.state_dict(), heads, kv_heads, ARCHITECTURE["embed_dim"])
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")


def config_of(inputs: Path, output_dir: Path) -> dict[str, Any]:
    """A complete config: 24 prompts, 4 at once, in 2 optimizer steps of 2; responses of up to 6 tokens."""
    checkpointer = {
        "_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": f"{inputs}/model",
        "checkpoint_files": ["model.safetensors"], "model_type": "LLAMA2", "output_dir": "${output_dir}",
    }  # fmt: skip
    of_reward = {**checkpointer, "checkpoint_dir": f"{inputs}/reward", "model_type": "REWARD"}
    return {
        "output_dir": str(output_dir),
        "tokenizer": {
            "_component_": "torchtune.models.llama2.llama2_tokenizer", "path": f"{inputs}/tokenizer.model",
            "max_seq_len": 24,
        },
        "dataset": {
            "_component_": "torchtune.datasets.text_completion_dataset", "source": "json",
            "data_files": f"{inputs}/train.json", "column": "instruction", "add_eos": False, "split": "train[:24]",
        },
        "policy_model": {"_component_": "torchtune.models.llama2.llama2", **ARCHITECTURE},
        "reward_and_value_model": {
            "_component_": "torchtune.models.llama2.llama2_classifier", "num_classes": 1, **ARCHITECTURE
        },
        "checkpointer": {**checkpointer, "recipe_checkpoint": None},
        "ref_policy_checkpointer": {**checkpointer, "output_dir": "${output_dir}/policy"},
        "value_checkpointer": {**of_reward, "output_dir": "${output_dir}/value"},
        "reward_checkpointer": {**of_reward, "output_dir": "${output_dir}/value"},
        "resume_from_checkpoint": False, "seed": 3, "shuffle": True, "device": "cpu", "dtype": "fp32",
        "batch_size": 4, "num_steps": 24, "ppo_epochs": 2, "ppo_batch_size": 2, "gradient_accumulation_steps": 1,
        "forward_batch_size": 2, "max_generated_tokens": GENERATED, "temperature": 0.7, "top_k": None,
        "compile": False, "optimizer": {"_component_": "torch.optim.SGD", "lr": 0.02}, "optimizer_in_bwd": False,
        "log_peak_memory_stats": False, "enable_activation_checkpointing": False, "enable_kv_cache": True,
        "min_response_length": 2, "penalise_no_eos": True, "reward_penalty": -3,
        "stop_token_ids": list(range(2, 160)),  # so that responses end after some tokens, each of its own number
        "whiten_rewards": False, "gamma": 1, "lmbda": 0.95,
        "loss": {
            "_component_": "torchtune.rlhf.loss.PPOLoss", "epsilon": 0.2, "value_coeff": 0.1, "value_clip_range": 0.2
        },
        "kl_coeff": 0.01,
        "metric_logger": {
            "_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": "${output_dir}/logs"
        },
        "log_every_n_steps": 1,
    }  # fmt: skip


class PPORun(Run):
    """What a run left behind, the value model included."""

    def weights_in(self, folder: str) -> dict[str, torch.Tensor]:
        """The weights of both models that were saved in folders of this name."""
        found: dict[str, torch.Tensor] = {}
        for name, directory in (("policy", self.output_dir), ("value", self.output_dir / "value")):
            path = directory / folder / "model-00001-of-00001.safetensors"
            found |= {f"{name}.{key}": weight for key, weight in load_file(path).items()}
        return found


def ppo_run(
    inputs: Path,
    directory: Path,
    *overrides: str,
    stock: bool = False,
    replaced: Mapping[str, object] = MappingProxyType({}),
) -> PPORun:
    """Run our recipe, or stock's, on the small config with ``overrides``."""
    save_reward_model(inputs)
    directory.mkdir(parents=True, exist_ok=True)
    for folder in ("policy", "value"):  # as stock's config says, they have to be there
        (directory / folder).mkdir(exist_ok=True)
    config = directory.parent / f"{directory.name}.yaml"
    OmegaConf.save({**config_of(inputs, directory), **copy.deepcopy(dict(replaced))}, config)
    recipe = "ppo_full_finetune_single_device"
    _main("run", recipe if stock else f"recipes/{recipe}.py", "--config", str(config), *overrides)
    return PPORun(directory)
