"""Train a Llama of 1.2 billion parameters with DistributedDataParallel: `torchrun --nproc_per_node 2 ddp.py`."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
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
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16)
    parameters = model.num_parameters()
    model = DistributedDataParallel(model, device_ids=[rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    data = TensorDataset(torch.randint(CONFIG.vocab_size, (2 * STEPS * BATCH_SIZE, LENGTH)))
    loader = DataLoader(data, BATCH_SIZE, sampler=DistributedSampler(data), num_workers=2, pin_memory=True)
    steps = 0
    for (tokens,) in loader:
        tokens = tokens.cuda(non_blocking=True)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if rank == 0:
            print(f"step {steps}: loss {loss.item():.3f}")
    if rank == 0:
        print(f"parameters={parameters} steps={steps} peak={torch.cuda.max_memory_allocated()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
