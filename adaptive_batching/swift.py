"""Adaptive batching for ms-swift: ``swift sft ... --external_plugins <this file>``.

Its settings are ``ADAPTIVE_BATCHING_SETTINGS=micro_batch_size=auto,memory_limit=40GiB`` in the environment; without it,
``micro_batch_size=auto``. ``python -m adaptive_batching.swift`` prints the path of this file.
"""

import importlib as _importlib
import os as _os
import sys as _sys
import typing as _typing

import torch.utils.data as _data

__all__ = ["adopting"]

_TASKS = ("causal_lm", "seq_cls", "dpo", "rm")
_made: dict[type, type] = {}


class _Batches(_data.BatchSampler):
    """A batch sampler of ms-swift's, which is none of torch's."""

    def __init__(self, inner: _typing.Any) -> None:
        self.inner, self.sampler, self.drop_last = inner, range(inner.total_samples), inner.drop_last

    @property
    def batch_size(self) -> int:
        return int(self.inner.batch_size)

    @batch_size.setter
    def batch_size(self, size: int) -> None:
        self.inner.batch_size = size

    def __iter__(self) -> _typing.Iterator[list[int]]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


class _Loader(_data.DataLoader[_typing.Any]):
    def set_epoch(self, epoch: int) -> None:
        _typing.cast(_Batches, self.batch_sampler).inner.set_epoch(epoch)


def adopting(trainer_class: _typing.Any) -> _typing.Any:
    """Return a subclass of a trainer of ms-swift's that makes itself adaptive, with a loader of torch's own.

    ms-swift's loader does no more than move batches to the device, as the trainer does.
    """
    from adaptive_batching._transformers.run_command import SETTINGS, parsed
    from adaptive_batching.transformers import adopt

    def __init__(self: _typing.Any, *args: _typing.Any, **kwargs: _typing.Any) -> None:
        trainer_class.__init__(self, *args, **kwargs)
        adopt(self, parsed(_os.environ.get(SETTINGS) or "auto"))

    def get_train_dataloader(self: _typing.Any, skip_batches: int = 0) -> _typing.Any:
        loader = trainer_class.get_train_dataloader(self, skip_batches)
        if getattr(self, "adaptive", None) is None or skip_batches or not hasattr(loader, "dataset"):
            return loader
        return _Loader(
            loader.dataset, batch_sampler=_Batches(loader.batch_sampler), collate_fn=self.data_collator,
            num_workers=loader.num_workers, pin_memory=loader.pin_memory, worker_init_fn=loader.worker_init_fn,
        )  # fmt: skip

    if trainer_class not in _made:
        members = {"__init__": __init__, "get_train_dataloader": get_train_dataloader, "__doc__": trainer_class.__doc__}
        members["__module__"] = trainer_class.__module__
        _made[trainer_class] = type(trainer_class.__name__, (trainer_class,), members)
    return _made[trainer_class]


def _plug_in() -> None:
    factory = _importlib.import_module("swift.trainers.trainer_factory").TrainerFactory
    stand_in = _sys.modules["adaptive_batching.swift"] = _sys.modules[__name__]
    for task in _TASKS:
        module, _, name = factory.TRAINER_MAPPING[task].rpartition(".")
        made = adopting(getattr(_importlib.import_module(module), name))
        setattr(stand_in, f"{task}_trainer", made)
        factory.TRAINER_MAPPING[task] = f"adaptive_batching.swift.{task}_trainer"


if __name__ == "__main__":
    print(__file__)
elif "swift" in _sys.modules:  # ms-swift loads its plugins by path
    _plug_in()
