"""Have Llamas of a process run out of memory in training: in forwards of more tokens than ``SHORT_MEMORY_TOKENS``.

A command that has this folder on ``PYTHONPATH`` is short of memory; nothing of it is in the product.
"""

import functools
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from typing import Any

_LLAMA = "transformers.models.llama.modeling_llama"


class _AfterLlama(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != _LLAMA:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_shorten(module: Any) -> None:
                load(module)
                _shorten(module.LlamaModel)

            spec.loader.exec_module = load_and_shorten  # type: ignore[method-assign]
        return spec


def _shorten(model: Any) -> None:
    import torch

    forward = model.forward
    most = int(os.environ["SHORT_MEMORY_TOKENS"])

    @functools.wraps(forward)
    def short(self: Any, input_ids: Any = None, *args: Any, **given: Any) -> Any:
        if torch.is_grad_enabled() and input_ids is not None and input_ids.numel() > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, input_ids, *args, **given)

    model.forward = short


if "SHORT_MEMORY_TOKENS" in os.environ:
    sys.meta_path.insert(0, _AfterLlama())
