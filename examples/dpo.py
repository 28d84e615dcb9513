"""DPO by TRL, adaptive: a batch runs in parts that fit, with the loss and the metrics of the whole batch.

pip install '.[transformers]' trl
python examples/dpo.py                                   # a tiny model from a config, on a CPU, in seconds
python examples/dpo.py Qwen/Qwen2.5-0.5B-Instruct        # a real one
"""

import copy
import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

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
    """Train on pairs for an epoch."""
    model, tokenizer = (sys.argv[1], AutoTokenizer.from_pretrained(sys.argv[1])) if sys.argv[1:] else tiny_model()

    def words(row, number):
        return " ".join(f"w{(7 * row + at) % 509}" for at in range(number))

    pairs = [
        {
            "prompt": words(row, 4 + row % 20),
            "chosen": " " + words(row + 1, 3 + 31 * row % 60),
            "rejected": " " + words(row + 2, 2 + 17 * row % 40),
        }
        for row in range(96)
    ]
    args = DPOConfig(
        "outputs/dpo",
        per_device_train_batch_size=16,
        num_train_epochs=1,
        logging_steps=2,
        bf16=torch.cuda.is_available(),
        report_to="none",
    )
    trainer = adaptive(DPOTrainer)(
        model=model,
        ref_model=None if sys.argv[1:] else copy.deepcopy(model),  # TRL loads one by the model's name
        args=args,
        train_dataset=Dataset.from_list(pairs),
        processing_class=tokenizer,
        adaptive="auto",
    )
    trainer.train()
    print(trainer.adaptive)


if __name__ == "__main__":
    main()
