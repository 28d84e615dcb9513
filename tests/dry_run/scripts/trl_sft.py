"""Fine-tune with the SFTTrainer of TRL."""

from llama import LENGTH, on_device, texts, tokenizer
from trl import SFTConfig, SFTTrainer


def main() -> None:
    model = on_device()
    arguments = SFTConfig(
        output_dir="outputs/sft", per_device_train_batch_size=2, max_length=LENGTH, max_steps=3, logging_steps=1,
        report_to="none", save_strategy="no",
    )  # fmt: skip
    trainer = SFTTrainer(model, args=arguments, train_dataset=texts(), processing_class=tokenizer())
    trainer.train()


if __name__ == "__main__":
    main()
