"""Prepare torch in every Python process on the emulated device as soon as it is imported, and watch it if asked to."""

import contextlib
import ctypes
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType


class _After(MetaPathFinder):
    """Finds a module as Python does, and prepares it when it has been loaded."""

    def __init__(self, name: str, prepare: Callable[[ModuleType], None]) -> None:
        self._name, self._prepare = name, prepare

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_prepare(module: ModuleType) -> None:
                if self in sys.meta_path:  # until here: many look for torch before they import it
                    sys.meta_path.remove(self)
                load(module)
                self._prepare(module)

            spec.loader.exec_module = load_and_prepare  # type: ignore[method-assign]
        return spec


def _prepare_torch(torch: ModuleType) -> None:
    from adaptive_batching._dry_run.device.values import prepare

    prepare()
    _start(os.environ.get("EMULATED_DEVICE_WATCH"))


def _prepare_padding(pad_mm: ModuleType) -> None:
    """Have Inductor pad products that are not aligned, as it does where it can time both."""
    pad_mm._skip_do_bench_times = True  # type: ignore[attr-defined]


def _start(watch: str | None) -> None:
    if watch is not None:
        try:
            importlib.import_module(watch).start()
        except Exception as error:  # a name that this torch has not
            print(f"emulated device: {watch} cannot watch this process ({error})", file=sys.stderr)


def _run_the_next() -> None:
    """Run the `sitecustomize` that this one stands in front of."""
    here = Path(__file__).parent
    others = [folder for folder in sys.path if Path(folder or ".").resolve() != here]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _check_card() -> None:
    """End a process that runs without the device: it might find a real one, or none."""
    if "EMULATED_DEVICE_MEMORY" not in os.environ or hasattr(ctypes.CDLL(None), "emulated_counters"):
        return
    why = "the emulated device is not loaded, as LD_PRELOAD was changed on the way here; leave it as it is"
    print(f"emulated device: {why}", file=sys.stderr, flush=True)
    if watch := os.environ.get("EMULATED_DEVICE_WATCH_ERRORS"):
        with contextlib.suppress(Exception):  # whatever is wrong with the report, this process ends
            importlib.import_module(watch).note(f"LostDevice: {why}")
    os._exit(1)


_check_card()
if prepares := os.environ.get("EMULATED_DEVICE_PREPARES"):
    for _name, _prepare in importlib.import_module(prepares).PREPARED.items():
        sys.meta_path.insert(0, _After(_name, _prepare))
sys.meta_path.insert(0, _After("torch", _prepare_torch))
sys.meta_path.insert(0, _After("torch._inductor.fx_passes.pad_mm", _prepare_padding))
_start(os.environ.get("EMULATED_DEVICE_WATCH_ERRORS"))  # of a process that never imports torch
_run_the_next()
