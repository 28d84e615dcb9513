"""Fine-tune with the SFTTrainer of TRL."""

import torch
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
    steps, peak = trainer.state.global_step, torch.cuda.max_memory_allocated()
    print(f"parameters={model.num_parameters()} steps={steps} peak={peak}")


if __name__ == "__main__":
    main()
