"""One step more than those whose memory counts, in which what it asks of the device is noted, as noting takes some."""

from __future__ import annotations

from pathlib import Path

import torch

from adaptive_batching._dry_run.collector import Collector
from adaptive_batching._dry_run.inputs import Inputs
from adaptive_batching._dry_run.process_work import Counts, ProcessWork, write_work


class ExtraStep:
    """Notes a step. It begins where one ends, once no backward pass is under way any more."""

    def __init__(self, folder: Path, inputs: Inputs) -> None:
        self._folder, self._inputs = folder, inputs
        self._collector = Collector()
        self._is_due = False
        self._before: Counts | None = None  # what had been drawn when it began

    def begin(self) -> None:
        """Look at what is captured long before it is run."""
        self._collector.begin()

    def start(self) -> None:
        """Start as soon as that can be: an optimizer in the backward pass ends its step on another thread."""
        self._is_due = True
        self.start_if_due()

    def start_if_due(self) -> None:
        if self._is_due and torch._C._current_graph_task_id() == -1:
            self._is_due, self._before = False, self._inputs.counts()
            self._collector.start()

    def end(self, rank: int) -> None:
        """Write down what was noted, if it could be started."""
        if self._before is None:
            return
        ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        counts = self._inputs.counts() - self._before
        write_work(self._folder, ProcessWork(rank, ranks, self._collector.result(), counts, self._collector.trouble))
