"""Fine-tune with a LoRA of PEFT, gradient checkpointing, and the Trainer of transformers."""

from llama import LENGTH, on_device, texts, tokenizer
from peft import LoraConfig, get_peft_model
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments


def main() -> None:
    model = on_device()
    lora = get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    lora.print_trainable_parameters()
    encode = tokenizer()
    data = texts().map(lambda row: encode(row["text"], truncation=True, max_length=LENGTH), remove_columns=["text"])
    arguments = TrainingArguments(
        output_dir="outputs/lora", per_device_train_batch_size=4, max_steps=3, logging_steps=1, bf16=True,
        gradient_checkpointing=True, report_to="none", save_strategy="no",
    )  # fmt: skip
    collate = DataCollatorForLanguageModeling(encode, mlm=False)
    Trainer(model=lora, args=arguments, train_dataset=data, data_collator=collate).train()


if __name__ == "__main__":
    main()
