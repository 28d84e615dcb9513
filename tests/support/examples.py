"""A state and a result to start from."""

from __future__ import annotations

from adaptive_batching._growth.increase import GrowthState
from adaptive_batching._probe.sizes import Measurement, ProbeResult

STATE = GrowthState(
    epoch=0, total_epochs=4, batch_size=4, initial_batch_size=4, maximum=64, global_batch_size=4, samples_seen=0,
    steps=0, lr_decay=1.0,
)  # fmt: skip

RESULT = ProbeResult(
    batch_size=8, reason="memory", budget_bytes=1000, total_bytes=2000, search="predict", seconds=1.5,
    measurements=[Measurement(2, True, 300, 0.1), Measurement(8, True, 900, 0.2), Measurement(16, False, None, 0.3)],
    predicted=[(2, 300), (8, 900), (16, 2**21)],
)  # fmt: skip
