"""Random runs hold the invariants, or end with a clear error: see ``random_runs.py``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.serial


@pytest.mark.parametrize(
    ("seed", "first", "count"),
    [(0, 0, 8), *(pytest.param(seed, 0, 60, marks=pytest.mark.slow) for seed in range(1, 6))],
)
def test_every_run_finishes_or_says_what_is_wrong(
    seed: int, first: int, count: int, inputs: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tests.integration.random_runs", str(inputs), str(tmp_path)]
    command += [str(seed), str(first), str(count)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3000, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout[done.stdout.index("{\n") :])
    print(done.stdout)
    assert found["runs"] == count
    assert set(found["outcomes"]) == {"finished", "clear error"}, done.stdout
    assert found["outcomes"]["finished"] >= count / 2
    assert found["recoveries"] > 0
