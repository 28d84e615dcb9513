"""Train a ResNet-50 in half precision, channels last, with a scaled loss."""

import torch
from torch import nn
from transformers import AutoModelForImageClassification, ResNetConfig


def main() -> None:
    with torch.device("cuda"):
        model = AutoModelForImageClassification.from_config(ResNetConfig(num_labels=1000))
    model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler()
    for _ in range(3):
        images = torch.randn(32, 3, 224, 224).pin_memory().cuda(non_blocking=True)
        labels = torch.randint(1000, (32,), device="cuda")
        with torch.autocast("cuda", torch.float16):
            loss = nn.functional.cross_entropy(model(images.to(memory_format=torch.channels_last)).logits, labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
