"""Your own loop, adaptive: it finds the largest batch that fits, trains, and runs out of memory on purpose.

pip install .
python examples/plain_loop.py            # on a CPU, or on a GPU if there is one, in seconds
python examples/plain_loop.py 2048       # with layers of that width
"""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from adaptive_batching import AdaptiveStep

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY = 1000


class Tagger(nn.Module):
    """Embeds tokens, mixes each with those before it, and predicts the next."""

    def __init__(self, width):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.mix = nn.GRU(width, width, batch_first=True)
        self.output = nn.Linear(width, VOCABULARY)
        self.fails_beyond = None
        """Tokens of a batch beyond which memory runs out: what a GPU does by itself."""

    def forward(self, tokens):
        """Return logits of [b, s, vocabulary] for tokens of [b, s]."""
        if self.fails_beyond is not None and tokens.numel() > self.fails_beyond:
            raise torch.OutOfMemoryError(f"{tokens.numel()} tokens, on purpose")
        return self.output(self.mix(self.embedding(tokens))[0])


def loss(model, batch):
    """Return the sum over targets, and their number; 0 is padding."""
    batch = batch.to(DEVICE)
    targets = batch[:, 1:]
    return cross_entropy(model(batch[:, :-1]).mT, targets, ignore_index=0, reduction="sum"), targets.ne(0).sum()


def main():
    """Train for two epochs, in the second of which memory runs out."""
    torch.manual_seed(0)
    model = Tagger(int(sys.argv[1]) if sys.argv[1:] else 64).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    lengths = 64 * [5, 90, 12, 33, 7, 21, 150, 9]
    data = [(torch.arange(length) + 7 * number) % (VOCABULARY - 1) + 1 for number, length in enumerate(lengths)]
    step = AdaptiveStep(model, optimizer, loss, lambda samples: pad_sequence(samples, batch_first=True), length=len)
    found = step.find_maximum_batch_size(max(data, key=len), upper=64)
    print(f"{found.batch_size} of the longest samples fit")
    for epoch in range(2):
        if epoch == 1:
            model.fails_beyond = 1500
        for samples in DataLoader(data, 64, shuffle=True, collate_fn=list):
            mean = step(samples)
        print(f"epoch {epoch}: loss {mean:.3f}, {step.num_recoveries} steps ran again in smaller parts")


if __name__ == "__main__":
    main()
