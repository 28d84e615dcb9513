from __future__ import annotations

import json
from dataclasses import asdict

from adaptive_batching._plan.against_allocator import AGREEMENT, Agreement
from tests.conftest import ROOT


def test_what_a_plan_says_of_itself_is_what_the_committed_result_says() -> None:
    result = (ROOT / "benchmarks" / "results" / "plan_vs_allocator_emulated.md").read_text()
    assert json.loads(result.strip().splitlines()[-1]) == asdict(AGREEMENT)


def test_errors_are_rounded_up() -> None:
    assert str(Agreement(40, 0.00421, 0.015, 1.0)) == (
        "in 40 runs on PyTorch's own allocator, tensors were within 0.5 % of the plan, and what it "
        "reserves at least, no stream being late, within 1.5 %"
    )
