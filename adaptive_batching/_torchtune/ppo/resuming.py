"""Find the value model of the checkpoint that a run goes on from."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from adaptive_batching._values import ConfigError


def take_value_model_of(policy: DictConfig, value: DictConfig) -> None:
    """Have the value model go on from the checkpoint that the policy goes on from, unless the config names another.

    Stock starts it from ``checkpoint_dir``, on resume as well. ConfigError if the checkpoint has no value model.
    """
    files = policy.checkpoint_files
    name = Path(str(files[0])).parent.name if OmegaConf.is_list(files) and files else ""
    output_dir = Path(value.output_dir)
    if not name or output_dir.resolve() in Path(value.checkpoint_dir).resolve().parents:
        return
    found = sorted(path.name for path in (output_dir / name).glob("model-*"))
    if not found:
        raise ConfigError(
            f"resume_from_checkpoint=True, and the policy goes on from {name}, of which value_checkpointer.output_dir="
            f"{value.output_dir!r} has no value model; set it to that of the run to resume"
        )
    value.checkpoint_dir, value.checkpoint_files = str(output_dir / name), found
