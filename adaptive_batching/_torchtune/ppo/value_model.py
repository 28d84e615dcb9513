"""The checkpoint of PPO's value model, which belongs to one of the policy."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from adaptive_batching._values import ConfigError


def take_value_model_of(policy: DictConfig, value: DictConfig) -> None:
    """Resume the value model with the policy, unless the config names another; stock would start it from scratch."""
    files = policy.checkpoint_files
    name = Path(str(files[0])).parent.name if OmegaConf.is_list(files) and files else ""
    output_dir = Path(value.output_dir)
    if not name or output_dir.resolve() in Path(value.checkpoint_dir).resolve().parents:
        return
    weights = sorted(path.name for path in (output_dir / name).glob("model-*"))
    if not weights:
        raise ConfigError(
            f"resume_from_checkpoint=True, but value_checkpointer.output_dir={value.output_dir!r} has no value model "
            f"of {name}, from which the policy resumes; set it to that of the run to resume"
        )
    value.checkpoint_dir, value.checkpoint_files = str(output_dir / name), weights
