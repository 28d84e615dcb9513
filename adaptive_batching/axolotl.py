"""Adaptive batching for axolotl.

In its YAML: ``plugins: [adaptive_batching.axolotl.AdaptivePlugin]`` and ``adaptive: auto``, or a mapping of settings.
"""

import importlib.util as _importlib_util
import typing as _typing

if _importlib_util.find_spec("axolotl") is None:
    raise ImportError("axolotl is not installed; pip install axolotl")

from axolotl.integrations.base import BasePlugin as _BasePlugin
from pydantic import BaseModel as _BaseModel

from adaptive_batching._values import ConfigError as _ConfigError
from adaptive_batching.transformers import AdaptiveArguments as _AdaptiveArguments
from adaptive_batching.transformers import adopt as _adopt

__all__ = ["AdaptiveInput", "AdaptivePlugin"]


class AdaptiveInput(_BaseModel):
    """The key that axolotl's YAML gains."""

    adaptive: str | dict[str, _typing.Any] | None = None


class AdaptivePlugin(_BasePlugin):
    """Makes the trainer adaptive that axolotl has made, for SFT as for DPO and reward models."""

    def get_input_args(self) -> str:
        return f"{__name__}.{AdaptiveInput.__name__}"

    def post_trainer_create(self, cfg: _typing.Any, trainer: _typing.Any) -> None:
        if not cfg.adaptive:
            return
        if cfg.sample_packing:
            raise _ConfigError(
                "sample_packing: true packs samples before they are drawn, and is not needed: adaptive runs samples "
                "without padding; set sample_packing: false"
            )
        given = cfg.adaptive if isinstance(cfg.adaptive, str) else dict(cfg.adaptive)
        _adopt(trainer, _AdaptiveArguments.of(given))
