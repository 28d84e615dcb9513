"""Hugging Face's ``Trainer`` and its subclasses with batches that fill the device, grow, and survive short memory."""
