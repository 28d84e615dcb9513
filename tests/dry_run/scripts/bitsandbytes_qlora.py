"""Fine-tune a model in 4 bits of bitsandbytes with a LoRA of PEFT and a paged 8-bit optimizer."""

import tempfile

import torch
from llama import Tokens, on_device
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments


def main() -> None:
    quantized = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        on_device().save_pretrained(folder)
        torch.cuda.empty_cache()
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantized, device_map="cuda")
    model = prepare_model_for_kbit_training(model)
    lora = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    arguments = TrainingArguments(
        output_dir="outputs/qlora", per_device_train_batch_size=2, max_steps=3, logging_steps=1, bf16=True,
        optim="paged_adamw_8bit", report_to="none", save_strategy="no",
    )  # fmt: skip
    Trainer(model=lora, args=arguments, train_dataset=Tokens()).train()


if __name__ == "__main__":
    main()
