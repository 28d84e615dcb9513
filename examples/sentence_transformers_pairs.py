"""sentence-transformers, adaptive: pairs with a score run in parts that fit, with the loss of the whole batch.

pip install '.[transformers]' sentence-transformers
python examples/sentence_transformers_pairs.py                                           # a tiny model, on a CPU
python examples/sentence_transformers_pairs.py sentence-transformers/all-MiniLM-L6-v2    # a real one

Losses that take each pair by itself are split. Those that compare a pair with the others of its batch, such as
MultipleNegativesRankingLoss, are not: their parts do not add up to the batch, and an error says so.
"""

import sys
import tempfile

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
    models,
)
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from adaptive_batching.transformers import adaptive


def tiny_model():
    """Return a model with a vocabulary of a few words."""
    words = ["[PAD]", "[UNK]", *(f"w{number}" for number in range(510))]
    made = Tokenizer(tokenizer_models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    with tempfile.TemporaryDirectory() as folder:
        BertModel(BertConfig(vocab_size=len(words), **sizes)).save_pretrained(folder)
        PreTrainedTokenizerFast(
            tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", model_max_length=512
        ).save_pretrained(folder)
        transformer = models.Transformer(folder)
    return SentenceTransformer(modules=[transformer, models.Pooling(64)])


def main():
    """Train for an epoch."""
    model = SentenceTransformer(sys.argv[1]) if sys.argv[1:] else tiny_model()

    def words(row, number):
        return " ".join(f"w{(7 * row + at) % 509}" for at in range(number))

    rows = range(256)
    data = Dataset.from_dict(
        {
            "sentence1": [words(row, 3 + (37 * row) ** 2 % 150) for row in rows],
            "sentence2": [words(row + row % 3, 3 + (11 * row) ** 2 % 90) for row in rows],
            "score": [1.0 - row % 3 / 2 for row in rows],
        }
    )
    args = SentenceTransformerTrainingArguments(
        "outputs/sentence_transformers",
        per_device_train_batch_size=64,
        num_train_epochs=1,
        logging_steps=1,
        report_to="none",
    )
    trainer = adaptive(SentenceTransformerTrainer)(
        model=model,
        args=args,
        train_dataset=data,
        loss=losses.CosineSimilarityLoss(model),
        adaptive="auto",
    )
    trainer.train()
    print(trainer.adaptive)


if __name__ == "__main__":
    main()
