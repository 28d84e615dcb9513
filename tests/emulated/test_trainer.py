"""What a run of Trainer records waits for nothing on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra transformers)")

from adaptive_batching._emulated_device import control  # noqa: E402
from adaptive_batching._report.events import find_record, read_events  # noqa: E402
from adaptive_batching._transformers.recording import Recording  # noqa: E402
from adaptive_batching.transformers import AdaptiveArguments  # noqa: E402
from tests.conftest import without_pages  # noqa: E402
from tests.transformers.trainers import make_trainer  # noqa: E402


class Asked(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Counts what steps 4 to 18 ask of the device."""

    def on_step_begin(self, args: Any, state: Any, control_: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            self._before = control.counters()
        elif state.global_step == 18:
            self.counters = control.counters() - self._before


def test_recording_a_step_waits_for_nothing(tmp_path: Path) -> None:
    asked = {}
    for records in (False, True):
        callback = Asked()
        trainer = make_trainer(
            tmp_path / str(records), AdaptiveArguments(micro_batch_size=4), use_cpu=False, num_train_epochs=4,
            logging_steps=100, logging_nan_inf_filter=False, callbacks=[callback],
        )  # fmt: skip
        if not records:
            trainer.remove_callback(Recording)
        with without_pages():
            trainer.train()
        asked[records] = callback.counters
    assert len(read_events(find_record(tmp_path / "True"))["step"]) == 20
    assert asked[True].synchronizations <= asked[False].synchronizations
    assert asked[True].kernels == asked[False].kernels
