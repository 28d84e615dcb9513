"""Run a recipe from its file: logging, errors in one line, and a clean exit."""

from __future__ import annotations

import logging
import os
from typing import Any

from omegaconf import DictConfig
from torchtune import config

from adaptive_batching.growth.increase import IncreaseFunctionError
from adaptive_batching.memory import is_out_of_memory
from adaptive_batching.micro_batches.run import CannotRecoverError
from adaptive_batching.probe.find import DoesNotFitError
from adaptive_batching.ranks.agree import GroupError
from adaptive_batching.torchtune.checkpoints import CheckpointError
from adaptive_batching.values import ConfigError

log = logging.getLogger(__name__)

# Errors whose message says what is wrong and what to do.
_CLEAR = (ConfigError, IncreaseFunctionError, DoesNotFitError, CannotRecoverError, GroupError, CheckpointError)


def run_recipe(recipe_class: type[Any], cfg: DictConfig) -> None:
    """Set a recipe up and train it, as the ``recipe_main`` of a stock recipe does; a mistake ends in one line."""
    if not logging.getLogger().handlers:
        logger = logging.getLogger("adaptive_batching")
        if not logger.handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(levelname)s:%(name)s: %(message)s"))
            logger.addHandler(handler)
        logger.setLevel(logging.INFO if int(os.environ.get("RANK", 0)) == 0 else logging.WARNING)
    try:
        config.log_config(recipe_name=recipe_class.__name__, cfg=cfg)
        recipe = recipe_class(cfg=cfg)
        recipe.setup(cfg=cfg)
        recipe.train()
        recipe.ranks.leave()
        recipe.cleanup()
    except _CLEAR as error:
        if error.__cause__ is not None:
            log.error("the cause, in full:", exc_info=error.__cause__)
        raise SystemExit(f"error: {error}") from None
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        log.error("out of memory, in full:", exc_info=error)
        raise SystemExit(
            f"error: out of memory outside of a forward or backward, where nothing can run again "
            f"({_first_line(error)}); a checkpoint that was saved before stands. Leave more memory: raise "
            f"adaptive_batching.headroom, or set a smaller batch_size"
        ) from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
