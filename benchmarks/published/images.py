"""Train a model of timm as its `benchmark.py --bench train` does with `--amp` and `--channels-last`: one batch, SGD.

Autocast is float16 without a scaler, as there, and cuDNN may choose its kernels.
"""

from __future__ import annotations

import argparse

import timm
import torch
from timm.optim import create_optimizer_v2

STEPS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("batch_size", type=int)
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    with torch.device("cuda"):
        model = timm.create_model(args.model).to(memory_format=torch.channels_last)
    model.train()
    optimizer = create_optimizer_v2(model, opt="sgd", lr=1e-4)
    loss_of = torch.nn.CrossEntropyLoss()
    images = torch.zeros(args.batch_size, 3, 224, 224, device="cuda").contiguous(memory_format=torch.channels_last)
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=False)  # torch's default until 2.0
        with torch.autocast("cuda", torch.float16):
            found = model(images)
            labels = torch.zeros(args.batch_size, dtype=torch.long, device="cuda")
            loss_of(found, labels).backward()
        optimizer.step()
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
