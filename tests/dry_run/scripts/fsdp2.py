"""Train with FSDP2, the model made on no device and sharded before it has memory: `torchrun --nproc_per_node 2 fsdp2.py`."""

import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig

CONFIG = LlamaConfig(
    hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=128256, tie_word_embeddings=True,
)  # fmt: skip
STEPS, BATCH_SIZE, LENGTH = 3, 2, 512


def main() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG)
    parameters = model.num_parameters()
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=precision)
    fully_shard(model, mp_policy=precision)
    model.to_empty(device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for step in range(1, STEPS + 1):
        tokens = torch.randint(CONFIG.vocab_size, (BATCH_SIZE, LENGTH), device="cuda")
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    if rank == 0:
        print(f"parameters={parameters} steps={STEPS} peak={torch.cuda.max_memory_allocated()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
