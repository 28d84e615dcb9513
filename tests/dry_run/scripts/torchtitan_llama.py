"""Pre-train torchtitan's Llama 3.2 1B with FSDP2: `torchrun --nproc_per_node 2 torchtitan_llama.py`."""

import os
import tempfile

import torch
from datasets import Dataset
from llama import TEXT, tokenizer
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_debugmodel


def main() -> None:
    DATASETS["repeated"] = DatasetConfig(
        path="", loader=lambda path: Dataset.from_dict({"text": [TEXT] * 64}), sample_processor=lambda row: row["text"]
    )
    config = llama3_debugmodel()
    config.model_spec = model_registry("1B")
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset="repeated")
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 2, 512, 3
    config.loss.loss_fn.global_vocab_size = 128256
    config.parallelism.spmd_backend = "partial_dtensor"  # the default needs a later torch
    config.validator.enable = False
    with tempfile.TemporaryDirectory() as folder:
        tokenizer().save_pretrained(folder)
        config.hf_assets_path = config.dump_folder = folder
        trainer = config.build()
        trainer.train()
        trainer.close()
    parameters = sum(p.numel() for part in trainer.model_parts for p in part.parameters())
    if os.environ["RANK"] == "0":
        print(f"parameters={parameters} steps={trainer.step} peak={torch.cuda.max_memory_allocated()}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
