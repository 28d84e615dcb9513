"""What is made of a filesystem that does not flush."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from unittest import mock

import pytest

from adaptive_batching._torchtune.stock.checkpoints import flush


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
