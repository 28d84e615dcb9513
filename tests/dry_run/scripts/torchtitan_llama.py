"""Pre-train a Llama of torchtitan with FSDP2: `torchrun --nproc_per_node 2 torchtitan_llama.py`."""

import tempfile

import datasets
from llama import TEXT, tokenizer
from torchtitan.config import ConfigManager
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models.llama3 import TransformerModelArgs, llama3_args
from torchtitan.train import Trainer


def main() -> None:
    repeated = datasets.Dataset.from_dict({"text": [TEXT] * 64})
    DATASETS["repeated"] = DatasetConfig("", lambda path: repeated, lambda row: row["text"])
    llama3_args["1B"] = TransformerModelArgs(
        dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, ffn_dim_multiplier=1.5, multiple_of=1024, rope_theta=500000
    )
    with tempfile.TemporaryDirectory() as folder:
        tokenizer().save_pretrained(folder)
        options = {
            "model.name": "llama3", "model.flavor": "1B", "model.hf-assets-path": folder, "job.dump-folder": folder,
            "training.dataset": "repeated", "training.local-batch-size": 2, "training.seq-len": 512,
            "training.steps": 3,
        }  # fmt: skip
        trainer = Trainer(ConfigManager().parse_args([f"--{name}={value}" for name, value in options.items()]))
        trainer.train()
        trainer.close()


if __name__ == "__main__":
    main()
