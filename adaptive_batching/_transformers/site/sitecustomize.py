"""Make each ``Trainer`` of a Python process adaptive, if it can be, as soon as ``transformers`` has the class."""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_TRAINER = "transformers.trainer"


class _AfterTrainer(MetaPathFinder):
    """Finds the module of ``Trainer`` as Python does, and adds a callback to those of every trainer."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _TRAINER:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_prepare(module: ModuleType) -> None:
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                load(module)
                module.DEFAULT_CALLBACKS.append(_MakesCallback)

            spec.loader.exec_module = load_and_prepare  # type: ignore[method-assign]
        return spec


class _MakesCallback:
    """Passes for the class of a callback; it imports what that takes when a trainer asks for one."""

    def __new__(cls) -> Any:
        if importlib.util.find_spec("adaptive_batching") is None:  # of a checkout, or another environment
            sys.path.append(str(Path(__file__).resolve().parents[3]))
        try:
            from adaptive_batching._transformers.of_command import OfCommand

            return OfCommand()
        except Exception as error:  # of other versions: the command is to run all the same
            print(
                f"adaptive-batching run: trainers stay as they are ({type(error).__name__}: {error})", file=sys.stderr
            )
            return sys.modules["transformers"].TrainerCallback()


def _run_the_next() -> None:
    """Run the ``sitecustomize`` that this one stands in front of."""
    here = Path(__file__).resolve().parent
    others = [folder for folder in sys.path if Path(folder or ".").resolve() != here]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, _AfterTrainer())
_run_the_next()
