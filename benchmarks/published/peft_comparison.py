"""Train as PEFT's method comparison does (`method_comparison/MetaMathQA` of huggingface/peft), for a peak of memory.

Its order of calls is kept where memory depends on it: the loss of the base model on 768 tokens first, batches from long
to short, a cache that is emptied after every tenth step, outputs of a step that live until the next one's are there.
Samples are of given lengths, since the data are not: three in a batch are a little shorter than the first, so that it
is padded, and attention gets a mask, as in nearly every batch of real samples.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, get_peft_model
from peft.optimizers import create_lorafa_optimizer
from sparse_weights import write_model
from transformers import AutoModelForCausalLM, LlamaConfig, get_cosine_schedule_with_warmup

LLAMA_3_2_3B = LlamaConfig(
    hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24, num_key_value_heads=8,
    head_dim=128, vocab_size=128256, tie_word_embeddings=True, max_position_embeddings=131072, rms_norm_eps=1e-5,
    bos_token_id=128000, eos_token_id=128001, dtype="bfloat16",
    rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
                     "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
)  # fmt: skip
BATCH_SIZE = 4
PUBLISHED_STEPS = 5000


def load(settings: dict[str, Any] | None, *, cast: bool = True) -> Any:
    """Return the model on the device, from a checkpoint of zeros, with the adapters of `settings`."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(LLAMA_3_2_3B, Path(folder))
        model = AutoModelForCausalLM.from_pretrained(folder, device_map="cuda", dtype=torch.bfloat16)
    if settings is None:
        return model
    return get_peft_model(
        model, PeftConfig.from_peft_type(task_type="CAUSAL_LM", **settings), autocast_adapter_dtype=cast
    )


def make_optimizer(model: Any, name: str) -> Any:
    if name == "lora-fa":
        return create_lorafa_optimizer(model, r=32, lora_alpha=64, lr=1e-4, weight_decay=0.1)
    return torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)


def padded(length: int) -> dict[str, torch.Tensor]:
    """Return a batch of samples that are padded to `length`."""
    ids = torch.full((BATCH_SIZE, length), 1000)
    mask = torch.ones_like(ids)
    for row in range(1, BATCH_SIZE):
        mask[row, length - row :] = 0
    return {"input_ids": ids.to("cuda"), "attention_mask": mask.to("cuda")}


@torch.inference_mode()
def base_loss(model: Any) -> None:
    """Compute the loss of the model as it was, on texts that are longer than 768 tokens."""
    for _ in range(2):
        batch = {"input_ids": torch.full((BATCH_SIZE, 768), 1000).cuda()}
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        for logits, target in zip(model(**batch).logits, batch["input_ids"], strict=True):
            torch.nn.functional.cross_entropy(logits[:-1], target[1:], reduction="none").mean().item()


def train(model: Any, optimizer: Any, lengths: list[int], update: Any) -> None:
    """Take a step on each length, or empty the cache where it is 0."""
    schedule = get_cosine_schedule_with_warmup(optimizer, PUBLISHED_STEPS // 10, PUBLISHED_STEPS)
    for step, length in enumerate(lengths, 1):
        if not length:
            torch.cuda.empty_cache()
            continue
        batch = padded(length)
        batch["labels"] = batch["input_ids"].clone()
        items = batch["attention_mask"].sum().item()
        optimizer.zero_grad()
        outputs = model(**batch, num_items_in_batch=items)
        loss = outputs.loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if update:
            update(step)
        loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peft", type=json.loads, help="peft_type and settings; without it all weights are trained")
    parser.add_argument("--optimizer", default="AdamW")
    parser.add_argument("--no-cast", dest="cast", action="store_false", help="leave adapters in bfloat16")
    parser.add_argument("--lengths", type=int, nargs="+", required=True, help="tokens of a step; 0: empty the cache")
    args = parser.parse_args()
    torch.nn.Linear(1, 1).to("cuda")  # 2 MiB, which their figures leave out
    model = load(args.peft, cast=args.cast)
    optimizer = make_optimizer(model, args.optimizer)
    model.eval()
    with model.disable_adapter() if args.peft else contextlib.nullcontext():
        base_loss(model)
    model.train()
    train(model, optimizer, args.lengths, getattr(getattr(model, "base_model", None), "update_and_allocate", None))


if __name__ == "__main__":
    main()
