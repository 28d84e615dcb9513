"""Attention within samples that lie end to end in one row, for models and loops of your own.

A batch is then a row, [1, tokens], and has no padding. With :class:`~adaptive_batching.AdaptiveStep`::

    def collate(samples):
        row = {key: torch.cat([s[key] for s in samples])[None] for key in samples[0]}
        return {**row, "bounds": SampleBounds([len(s["tokens"]) for s in samples])}

    def loss(model, batch):
        logits = model(batch["tokens"], batch["bounds"])
        return cross_entropy(logits[0], batch["labels"][0], reduction="sum"), batch["labels"].numel()

In the model, positions are ``bounds.positions()``, and in place of :func:`scaled_dot_product_attention`::

    out = attend_within_samples(query, key, value, bounds)  # [1, heads, tokens, head size]

The gradient is that of the padded batch if all else in the model treats each token by itself, without recurrence or
convolution over tokens. A loss that shifts labels by one has to ignore the first of each sample, ``bounds.starts()``.
"""

from adaptive_batching._attention import SampleBounds, attend_within_samples

__all__ = ["SampleBounds", "attend_within_samples"]
