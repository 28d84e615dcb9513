"""SFT with LoRA by TRL, adaptive: samples run without padding, and what runs out of memory runs in smaller parts.

pip install '.[transformers]' trl peft
python examples/sft_lora.py                              # a tiny model from a config, on a CPU, in seconds
python examples/sft_lora.py Qwen/Qwen2.5-0.5B-Instruct   # a real one
"""

import sys

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from adaptive_batching.transformers import adaptive


def tiny_model():
    """Return a model with a vocabulary of a few words, and its tokenizer."""
    words = ["<pad>", "<eos>", *(f"w{number}" for number in range(510))]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(words), pad_token_id=0, eos_token_id=1, **sizes)
    return LlamaForCausalLM(config), PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>"
    )


def main():
    """Train for an epoch."""
    model, tokenizer = (sys.argv[1], AutoTokenizer.from_pretrained(sys.argv[1])) if sys.argv[1:] else tiny_model()
    # Most samples are short, and some are long: what padding is expensive for.
    texts = [" ".join(f"w{(7 * row + at) % 509}" for at in range(3 + (37 * row) ** 2 % 200)) for row in range(256)]
    args = SFTConfig(
        "outputs/sft_lora",
        per_device_train_batch_size=32,
        num_train_epochs=1,
        learning_rate=1e-3,
        logging_steps=2,
        bf16=torch.cuda.is_available(),
        report_to="none",
    )
    trainer = adaptive(SFTTrainer)(
        model=model,
        args=args,
        train_dataset=Dataset.from_list([{"text": text} for text in texts]),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, target_modules="all-linear"),
        adaptive="auto",
    )
    trainer.train()
    print(trainer.adaptive)


if __name__ == "__main__":
    main()
