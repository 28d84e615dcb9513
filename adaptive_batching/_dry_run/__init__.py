"""Run anyone's training script on an emulated card, and say whether it fits, what it takes, and where."""

from adaptive_batching._values import DRY_RUN

FOLDER, STEPS = DRY_RUN, f"{DRY_RUN}_STEPS"
"""Variables of the environment by which a process knows that it is watched, and for how many steps."""
