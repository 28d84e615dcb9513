"""Train with DistributedDataParallel: `torchrun --nproc_per_node 2 ddp.py`."""

import os

import torch
import torch.distributed as dist
from llama import Tokens, on_device
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    model = DistributedDataParallel(on_device(), device_ids=[rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    loader = DataLoader(Tokens(), batch_size=2, sampler=DistributedSampler(Tokens()), num_workers=2, pin_memory=True)
    for step, batch in enumerate(loader, start=1):
        loss = model(**{name: values.cuda(non_blocking=True) for name, values in batch.items()}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
