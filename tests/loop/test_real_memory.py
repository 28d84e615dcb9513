"""A long sample in the middle of the data, under a real memory limit: a plain loop goes on, and learns the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.support.environment import TAME_MALLOC


@pytest.mark.serial
def test_a_long_sample_does_not_end_a_plain_loop_and_changes_no_loss() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.loop.limited_loop"],
        cwd=ROOT, env={**os.environ, **TAME_MALLOC}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["free"]["recoveries"] == 0
    assert found["limited"]["recoveries"] >= 1, "the limit was met"
    assert found["limited"]["losses"] == pytest.approx(found["free"]["losses"], rel=1e-4)
