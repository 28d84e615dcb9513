"""Fine-tune a vision transformer as torchao's `benchmark_low_bit_adam.py` does, on images of 224 pixels, 45 classes.

Weights are float32 with autocast, or all of the model is bfloat16. Images come from a loader's pinned memory, and their
copy is waited for; nothing else is, but for the loss of every tenth step.
"""

from __future__ import annotations

import argparse

import bitsandbytes as bnb
import timm
import torch
import torch.nn.functional as F

STEPS, CLASSES = 4, 45


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("batch_size", type=int)
    parser.add_argument("--full-bfloat16", action="store_true")
    parser.add_argument("--checkpoint", action="store_true", help="activation checkpointing")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--bits8", action="store_true", help="bitsandbytes' 8-bit AdamW")
    args = parser.parse_args()
    size = {"img_size": 224} if "dinov2" in args.model else {}
    with torch.device("cuda"):
        model = timm.create_model(args.model, num_classes=CLASSES, **size)
    if args.checkpoint:
        model.set_grad_checkpointing()
    if args.full_bfloat16:
        model.bfloat16()
    if args.compile:
        model.compile(fullgraph=True)
    if args.bits8:
        optimizer = bnb.optim.AdamW8bit(model.parameters(), lr=1e-4, weight_decay=0)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0, fused=True)
    model.train()
    kind = torch.bfloat16 if args.full_bfloat16 else torch.float32
    for _ in range(STEPS):
        images = torch.zeros(args.batch_size, 3, 224, 224, dtype=kind, pin_memory=True)
        labels = torch.zeros(args.batch_size, dtype=torch.long)
        with torch.autocast("cuda", torch.bfloat16, enabled=not args.full_bfloat16):
            loss = F.cross_entropy(model(images.cuda()), labels.cuda())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
