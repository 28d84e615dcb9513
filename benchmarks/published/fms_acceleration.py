"""Fine-tune as the benchmarks of IBM's fms-acceleration do without its kernels, for a peak of memory or a step's time.

That is Hugging Face's Trainer on full samples of 4,096 tokens, with activation checkpointing and no autocast. They ran
flash-attn's FlashAttention 2; here attention is torch's, whose flash attention keeps and returns as much.

Two devices share a model by Accelerate's FSDP; the group is torch's fake one, this process being the first. With
`--four-bit` weights are bitsandbytes' NF4 with double quantization, and autocast is on: `plain` prepares the model as
their plugin does (`accelerated-peft-bnb`), which casts nothing, `trl` as TRL does (`baseline-peft-bnb`).
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from peft.tuners.tuners_utils import BaseTunerLayer
from sparse_weights import write_model
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GraniteConfig,
    MistralConfig,
    Trainer,
    TrainingArguments,
)

LENGTH = 4096
STEPS = 4
CONFIGS = {
    "Mistral-7B": MistralConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=32000, max_position_embeddings=32768, rms_norm_eps=1e-5,
        sliding_window=None,  # it is as long as a sample, and torch's attention would get a mask for it
    ),
    "PowerLM-3b": GraniteConfig(
        hidden_size=2304, intermediate_size=9216, num_hidden_layers=40, num_attention_heads=36, num_key_value_heads=36,
        vocab_size=49152, max_position_embeddings=4096, tie_word_embeddings=True,
    ),
}  # fmt: skip


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Full samples."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, _: int) -> dict[str, torch.Tensor]:
        ids = torch.full((LENGTH,), 100)
        return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


def grouped_attention(_: Any, query: Any, key: Any, value: Any, mask: Any, dropout: float = 0.0, **given: Any) -> Any:
    """Attend without repeating keys and values for the queries' heads, as FlashAttention 2 does."""
    assert mask is None
    found = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return found.transpose(1, 2).contiguous(), None


def load(config: Any, *, four_bit: bool) -> Any:
    if not four_bit:
        with torch.device("cuda"):
            return AutoModelForCausalLM.from_config(config, torch_dtype=torch.bfloat16, attn_implementation="sdpa")
    quantized = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_use_double_quant=True, bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        write_model(config, Path(folder))
        return AutoModelForCausalLM.from_pretrained(
            folder, device_map={"": 0}, torch_dtype=torch.bfloat16, attn_implementation="sdpa",
            quantization_config=quantized,
        )  # fmt: skip


def make_model(name: str, *, lora: bool, four_bit: str | None) -> Any:
    try:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ImportError:  # transformers 4.45
        pass
    else:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = grouped_attention
    model = load(CONFIGS[name], four_bit=four_bit is not None)
    if not lora:
        return model
    if four_bit == "trl":
        model = prepare_model_for_kbit_training(model)
    model.enable_input_require_grads()
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    settings = LoraConfig(r=16, lora_alpha=16, lora_dropout=0.1, target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(model, settings)
    if four_bit == "trl":
        cast_as_trl(model)
    return model


def cast_as_trl(model: Any) -> None:
    """Cast what TRL casts for autocast: adapters, embeddings and output to bfloat16, norms to float32."""
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) or any(part in name for part in ("lm_head", "embed_tokens")):
            module.to(torch.bfloat16)
        elif "norm" in name:
            module.to(torch.float32)


def share_between(devices: int) -> None:
    """Make this process the first of some, whose Trainer shares a model as their configuration of Accelerate says."""
    os.environ |= {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(devices), "MASTER_ADDR": "localhost", "MASTER_PORT": "0",
        "ACCELERATE_USE_FSDP": "true", "FSDP_SHARDING_STRATEGY": "FULL_SHARD", "FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
        "FSDP_SYNC_MODULE_STATES": "true", "FSDP_USE_ORIG_PARAMS": "true",
    }  # fmt: skip
    dist.init_process_group("fake", rank=0, world_size=devices, store=FakeStore())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=CONFIGS, required=True)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--four-bit", choices=("plain", "trl"))
    args = parser.parse_args()
    if args.devices > 1:
        share_between(args.devices)
    model = make_model(args.model, lora=args.lora or args.four_bit is not None, four_bit=args.four_bit)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=args.batch_size, gradient_checkpointing=True,
            max_steps=STEPS, weight_decay=0.01, warmup_steps=10, adam_epsilon=1e-4, lr_scheduler_type="linear",
            save_strategy="no", report_to=[], disable_tqdm=True, include_tokens_per_second=True,
            bf16=args.four_bit is not None,
        )  # fmt: skip
        Trainer(model=model, args=settings, train_dataset=Samples(STEPS * args.batch_size * args.devices)).train()


if __name__ == "__main__":
    main()
