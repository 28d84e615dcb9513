"""Settings of a PPO config that ask for something in vain."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from adaptive_batching._torchtune.train.settings import read_settings
from adaptive_batching._values import ConfigError, Explore, Fixed, divisors_of


def check_ppo_settings(cfg: DictConfig) -> None:
    """Refuse what the settings of a PPO config ask for in vain.

    Raises:
        ConfigError: On the first setting that cannot be used.
    """
    settings = read_settings(cfg, warns=False)
    if not settings.enabled:
        return
    size = settings.micro_batch_size
    if isinstance(size, Explore):
        raise ConfigError(
            "micro_batch_size=explore does not work with PPO, whose trajectories all have the same length; write "
            "auto, for as many as fit, or a number"
        )
    if settings.keep_global_batch:
        raise ConfigError(
            "adaptive_batching.keep_global_batch=True does not work with PPO: ppo_batch_size, which the optimizer "
            "sees, grows with batch_size; set keep_global_batch=False"
        )
    policy_dir, value_dir = cfg.checkpointer.output_dir, cfg.value_checkpointer.output_dir
    if settings.save_every_n_steps is not None and Path(policy_dir).resolve() == Path(value_dir).resolve():
        raise ConfigError(
            f"save_every_n_steps={settings.save_every_n_steps} would save policy and value model to the same folders, "
            f"in output_dir={policy_dir!r}; set value_checkpointer.output_dir to another"
        )
    rows = cfg.ppo_batch_size // cfg.gradient_accumulation_steps
    if isinstance(size, Fixed) and not settings.resizes and rows % size.samples:
        raise ConfigError(
            f"micro_batch_size={size} does not divide the {rows} trajectories of a backward pass (ppo_batch_size="
            f"{cfg.ppo_batch_size} / gradient_accumulation_steps={cfg.gradient_accumulation_steps}); these do: "
            f"{divisors_of(rows)}"
        )
