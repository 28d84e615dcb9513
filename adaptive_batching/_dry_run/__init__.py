"""Run anyone's training script on an emulated card, and say whether it fits, what it takes, and where."""

FOLDER, STEPS = "ADAPTIVE_BATCHING_DRY_RUN", "ADAPTIVE_BATCHING_DRY_RUN_STEPS"
"""Variables of the environment by which a process knows that it is watched, and for how many steps."""
