"""Messages where EleutherAI's harness is missing, or does not go with what is installed."""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import os
import sys
from pathlib import Path
from unittest import mock

import pytest

from adaptive_batching._torchtune.stock.checkpoints import flush
from adaptive_batching._torchtune.stock.loading import load_stock_evaluation

MODULE = "_torchtune_stock_eleuther_eval"


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        (None, "eleuther_eval needs lm_eval, which is not installed"),
        ("0.4.7", r"eleuther_eval needs lm_eval 0\.4\.8 or later, but 0\.4\.7 is installed"),
        ("0.4.13", r"lm_eval 0\.4\.13 cannot be imported \(import of .*\)"),
    ],
)
def test_a_harness_that_cannot_be_used_is_named_each_time(
    installed: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    for module in ("lm_eval", "lm_eval.evaluator"):
        monkeypatch.setitem(sys.modules, module, None)
    for _ in range(2):
        with pytest.raises(SystemExit, match=rf"error: {message}; pip install '\.\[eval\]' in the folder of"):
            load_stock_evaluation()
        assert MODULE not in sys.modules


def test_a_folder_that_a_filesystem_does_not_flush_ends_nothing_but_a_broken_disk_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for number, ends in ((errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)):
        error = OSError(number, "of a filesystem")
        monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=error))
        with pytest.raises(OSError, match="of a filesystem") if ends else contextlib.nullcontext():
            flush(tmp_path)
        with pytest.raises(OSError, match="of a filesystem"):
            flush(tmp_path / "file")
