"""Train a Llama of 1.2 billion parameters with the Trainer of transformers."""

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

CONFIG = LlamaConfig(
    hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=128256, tie_word_embeddings=True,
)  # fmt: skip
LENGTH = 512


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random tokens."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(CONFIG.vocab_size, (LENGTH,))
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16)
    arguments = TrainingArguments(
        output_dir="outputs/trainer", per_device_train_batch_size=2, max_steps=3, logging_steps=1, bf16=True,
        report_to="none", save_strategy="no", dataloader_num_workers=2,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=Tokens())
    trainer.train()
    steps, peak = trainer.state.global_step, torch.cuda.max_memory_allocated()
    print(f"parameters={model.num_parameters()} steps={steps} peak={peak}")


if __name__ == "__main__":
    main()
