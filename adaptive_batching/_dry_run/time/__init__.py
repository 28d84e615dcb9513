"""Seconds of an optimizer step on a card, from what the step asks of it and from what its maker says of the card."""
