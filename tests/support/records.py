"""Records of runs, read back."""

from __future__ import annotations

import json
from typing import Any

from tests.conftest import Run


def events(run: Run, kind: str) -> list[dict[str, Any]]:
    """The events of one kind in a run's record, in order."""
    lines = (run.output_dir / "adaptive_batching" / "report.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def without_sizes(metrics: list[dict[str, float]]) -> list[dict[str, float]]:
    """Metrics as stock logs them."""
    ours = ("batch_size", "global_batch_size", "ppo_batch_size", "oom_retries")
    return [{k: v for k, v in step.items() if k not in ours} for step in metrics]
