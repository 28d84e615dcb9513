"""Run anyone's training script on an emulated card, and say whether it fits, what it takes, and where."""
