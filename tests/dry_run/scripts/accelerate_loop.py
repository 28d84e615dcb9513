"""Train with a loop of one's own that accelerate prepares."""

import torch
from accelerate import Accelerator
from llama import CONFIG, LENGTH, on_device
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    model = on_device(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    loader = DataLoader(TensorDataset(torch.randint(CONFIG.vocab_size, (12, LENGTH))), batch_size=2, pin_memory=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for (tokens,) in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
