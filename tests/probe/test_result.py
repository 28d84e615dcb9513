from __future__ import annotations

import logging
from pathlib import Path

import pytest

from adaptive_batching.probe.result import ProbeResult, load_result, store_result
from adaptive_batching.probe.sizes import Measurement

RESULT = ProbeResult(
    batch_size=8, reason="memory", budget_bytes=1000, total_bytes=2000, search="predict", seconds=1.5,
    measurements=[Measurement(2, True, 300, 0.1), Measurement(8, True, 900, 0.2), Measurement(16, False, None, 0.3)],
    predicted=[(2, 300), (8, 900), (16, 2**21)], shorter=[(32, 20, 800), (16, 45, 950)],
)  # fmt: skip


def test_a_stored_result_comes_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "new" / "probe.json"
    store_result(path, {"dtype": "fp32", "sizes": (1, 2)}, RESULT)
    assert load_result(path, {"dtype": "fp32", "sizes": (1, 2)}) == RESULT
    assert RESULT.peak_bytes == 900
    assert RESULT.num_out_of_memory == 1
    assert list(path.parent.iterdir()) == [path]


def test_a_result_found_under_other_conditions_is_ignored_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "probe.json"
    store_result(path, {"dtype": "fp32", "device": "A"}, RESULT)
    assert load_result(path, {"dtype": "bf16", "device": "A", "torch": "2"}) is None
    assert "dtype: 'fp32' -> 'bf16', torch: None -> '2'" in caplog.text


@pytest.mark.parametrize("text", ["", "{", "[]", '{"key": {}}', '{"key": {}, "result": {"batch_size": 3}}'])
def test_a_damaged_file_is_ignored_with_a_warning(text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "probe.json"
    path.write_text(text)
    assert load_result(path, {}) is None
    assert "cannot be read" in caplog.text
    assert load_result(tmp_path / "missing.json", {}) is None
