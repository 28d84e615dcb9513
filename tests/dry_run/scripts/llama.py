"""A Llama of 1.2 billion parameters, the sizes of Llama 3.2 1B, and a tokenizer: nothing is downloaded."""

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

CONFIG = LlamaConfig(
    hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=128256, max_position_embeddings=8192, tie_word_embeddings=True,
)  # fmt: skip
LENGTH = 512
TEXT = "Whoever wants to know what a training step takes can run it and look. " * 60
CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"


def on_device(dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """Return the model, made on the device, so that the host holds none of it."""
    with torch.device("cuda"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIG, dtype=dtype)
    return model


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """64 samples of random tokens."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(CONFIG.vocab_size, (LENGTH,))
        return {"input_ids": tokens, "labels": tokens}


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([], trainers.BpeTrainer(special_tokens=["<s>", "<pad>"], initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<s>", pad_token="<pad>", chat_template=CHAT)


def texts() -> Any:
    """Return 64 texts that are longer than `LENGTH` tokens."""
    import datasets

    return datasets.Dataset.from_dict({"text": [TEXT] * 64})
