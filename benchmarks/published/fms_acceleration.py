"""Fine-tune as the benchmarks of IBM's fms-acceleration do without its kernels, for a peak of memory.

That is Hugging Face's Trainer on full samples of 4,096 tokens, with activation checkpointing and no autocast. They ran
flash-attn's FlashAttention 2; here attention is torch's, whose flash attention keeps and returns as much.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GraniteConfig, MistralConfig, Trainer, TrainingArguments

LENGTH = 4096
STEPS = 3
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


def make_model(name: str, *, lora: bool) -> Any:
    config = CONFIGS[name]
    try:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ImportError:  # transformers 4.45
        pass
    else:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = grouped_attention
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, torch_dtype=torch.bfloat16, attn_implementation="sdpa")
    if lora:
        model.enable_input_require_grads()
        targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
        settings = LoraConfig(r=16, lora_alpha=16, lora_dropout=0.1, target_modules=targets, task_type="CAUSAL_LM")
        model = get_peft_model(model, settings)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=CONFIGS, required=True)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--batch-size", type=int, required=True)
    args = parser.parse_args()
    model = make_model(args.model, lora=args.lora)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=args.batch_size, gradient_checkpointing=True,
            max_steps=STEPS, weight_decay=0.01, warmup_steps=10, adam_epsilon=1e-4, lr_scheduler_type="linear",
            save_strategy="no", report_to=[], disable_tqdm=True, include_tokens_per_second=True,
        )  # fmt: skip
        Trainer(model=model, args=settings, train_dataset=Samples(STEPS * args.batch_size)).train()


if __name__ == "__main__":
    main()
