"""Trainer with FSDP2 on several devices, adaptive: ranks share out the samples of a step by predicted time.

pip install '.[transformers]' 'torch>=2.13'
torchrun --nproc_per_node 2 examples/two_ranks.py                # two processes on a CPU, in a minute
torchrun --nproc_per_node 2 examples/two_ranks.py Qwen/Qwen2.5-0.5B    # a real model
"""

import sys

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from adaptive_batching.transformers import adaptive


def collate(samples):
    """Pad samples to a batch; 0 is padding."""
    ids = pad_sequence([torch.tensor(sample["input_ids"]) for sample in samples], batch_first=True)
    return {"input_ids": ids, "attention_mask": ids.ne(0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def main():
    """Train for an epoch."""
    if sys.argv[1:]:
        model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    else:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=1000, **sizes))
    data = [{"input_ids": [1 + (7 * n + i) % 999 for i in range(4 + (37 * n) ** 2 % 200)]} for n in range(128)]
    args = TrainingArguments(
        "outputs/two_ranks",
        per_device_train_batch_size=16,
        num_train_epochs=1,
        fsdp=True,
        fsdp_config={"version": 2},
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,
        report_to="none",
    )
    trainer = adaptive(Trainer)(model, args, collate, data, adaptive="auto")
    trainer.train()
    if trainer.is_world_process_zero():
        print(trainer.adaptive)


if __name__ == "__main__":
    main()
