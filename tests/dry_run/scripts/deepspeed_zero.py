"""Train with ZeRO of DeepSpeed, stage 2 or 3: `torchrun --nproc_per_node 2 deepspeed_zero.py --stage 3`."""

import argparse

import deepspeed
import torch
from llama import CONFIG, LENGTH, on_device


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=2)
    stage = parser.parse_args().stage
    deepspeed.init_distributed()
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
    }
    with deepspeed.zero.Init(config_dict_or_path=settings, enabled=stage == 3):
        model = on_device()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    for _ in range(3):
        tokens = torch.randint(CONFIG.vocab_size, (2, LENGTH), device=engine.device)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
