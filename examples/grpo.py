"""GRPO with TRL, adaptive: what is generated is TRL's, and its forward and backward passes run in parts that fit.

pip install '.[transformers]' trl
python examples/grpo.py                                  # a tiny model from a config, on a CPU, in half a minute
python examples/grpo.py Qwen/Qwen2.5-0.5B-Instruct       # a real one
"""

import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from adaptive_batching.transformers import adaptive


def unlike_words(completions, **columns):
    """Reward completions by the number of unlike words in them."""
    return [float(len(set(text.split()))) for text in completions]


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
    """Train for four steps."""
    model, tokenizer = (sys.argv[1], AutoTokenizer.from_pretrained(sys.argv[1])) if sys.argv[1:] else tiny_model()
    prompts = [" ".join(f"w{(7 * row + at) % 509}" for at in range(3 + row % 30)) for row in range(64)]
    args = GRPOConfig(
        "outputs/grpo",
        per_device_train_batch_size=16,
        num_generations=4,
        max_completion_length=64,
        max_steps=4,
        logging_steps=1,
        bf16=torch.cuda.is_available(),
        report_to="none",
    )
    trainer = adaptive(GRPOTrainer)(
        model, unlike_words, args, Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=tokenizer, adaptive="auto",
    )  # fmt: skip
    trainer.train()
    print(trainer.adaptive)


if __name__ == "__main__":
    main()
