"""Run anyone's training script on an emulated card, and say whether it fits, what it takes, and where."""

from adaptive_batching._values import DRY_RUN

FOLDER, STEPS, TIME, SCRATCH = DRY_RUN, f"{DRY_RUN}_STEPS", f"{DRY_RUN}_TIME", f"{DRY_RUN}_SCRATCH"
"""Variables of the environment by which a process knows that it is watched, for how many steps, if one more is run for
what it asks of the device, and where to write what is thrown away."""
