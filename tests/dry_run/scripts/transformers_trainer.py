"""Train with the Trainer of transformers."""

from llama import Tokens, on_device
from transformers import Trainer, TrainingArguments


def main() -> None:
    arguments = TrainingArguments(
        output_dir="outputs/trainer", per_device_train_batch_size=2, max_steps=3, logging_steps=1, bf16=True,
        report_to="none", save_strategy="no", dataloader_num_workers=2,
    )  # fmt: skip
    Trainer(model=on_device(), args=arguments, train_dataset=Tokens()).train()


if __name__ == "__main__":
    main()
