from __future__ import annotations

import json

from adaptive_batching._plan.published import PEAKS, Peak, error_band
from tests.conftest import ROOT


def test_the_band_is_that_of_the_errors_whatever_their_sign() -> None:
    band = error_band([Peak("low", 10.0, 9.0), Peak("right", 10.0, 10.0), Peak("high", 10.0, 10.31)])
    assert (band.peaks, band.half_within, band.all_within) == (3, 0.031, 0.1)
    assert str(band) == "of 3 published peaks, half were within 4 %, all within 10 %"


def test_the_band_that_a_plan_prints_is_that_of_the_committed_result() -> None:
    result = (ROOT / "benchmarks" / "results" / "published_memory_cpu.md").read_text()
    figures = json.loads(result.strip().splitlines()[-1])
    band = error_band()
    assert (figures["rows"], figures["median_error"], figures["max_error"]) == (
        band.peaks, band.half_within, band.all_within,
    )  # fmt: skip
    for peak in PEAKS:
        assert f"| {peak.name} | {peak.published_gib:.1f} GiB |" in result
        assert f"{peak.planned_gib:.2f} GiB" in result
