"""Prefer answers with the DPOTrainer of TRL, with a LoRA of PEFT: the reference is the model without it."""

from datasets import Dataset
from llama import LENGTH, TEXT, on_device, tokenizer
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer


def main() -> None:
    model = on_device()
    pairs = Dataset.from_dict({"prompt": ["What does it take?"] * 64, "chosen": [TEXT] * 64, "rejected": [TEXT] * 64})
    arguments = DPOConfig(
        output_dir="outputs/dpo", per_device_train_batch_size=2, max_length=LENGTH, max_steps=3, logging_steps=1,
        report_to="none", save_strategy="no",
    )  # fmt: skip
    lora = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = DPOTrainer(model, args=arguments, train_dataset=pairs, processing_class=tokenizer(), peft_config=lora)
    trainer.train()


if __name__ == "__main__":
    main()
