"""Train a compiled model, its launches captured in CUDA graphs."""

import torch
from llama import CONFIG, LENGTH, on_device


def main() -> None:
    model = on_device()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    compiled = torch.compile(model, mode="reduce-overhead")
    for _ in range(5):
        tokens = torch.randint(CONFIG.vocab_size, (2, LENGTH), device="cuda")
        loss = compiled(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
