"""Train with accelerate and FSDP2: `torchrun --nproc_per_node 2 accelerate_fsdp2.py`."""

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from llama import CONFIG, LENGTH, on_device
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        reshard_after_forward=True, activation_checkpointing=True,
    )  # fmt: skip
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
    model = on_device()
    loader = DataLoader(TensorDataset(torch.randint(CONFIG.vocab_size, (12, LENGTH))), batch_size=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for (tokens,) in loader:
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()


if __name__ == "__main__":
    main()
