from __future__ import annotations

import logging
from pathlib import Path

import pytest

from adaptive_batching._probe.result import load_result, store_result
from tests.support.examples import RESULT


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
