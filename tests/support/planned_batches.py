"""Plan the configs of this package, and write the batch sizes that fit into their comments. To do so, run this module::

python -m tests.support.planned_batches [<part of a path> ...]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from adaptive_batching._torchtune.commands import LAUNCHED
from adaptive_batching._torchtune.planning import Question, sketch
from adaptive_batching._trace.allocator import GIB
from tests.support.processes import in_a_process

FOLDER = Path(__file__).parents[2] / "recipes" / "configs"
ADAPTIVE = sorted(path for path in FOLDER.glob("**/*.yaml") if path.parent.name != "quickstart")
CARDS = (24, 48, 80)
"""GiB of the cards."""

_FIGURES = re.compile(r"^#   24 GiB: .*$", flags=re.MULTILINE)


def question_of(path: Path) -> Question:
    """Return the run that a config says it is launched as."""
    text = path.read_text()
    [recipe] = re.findall(LAUNCHED, text)
    devices = re.search(r"--nproc_per_node (\d+)", text)
    cfg: Any = OmegaConf.load(path)
    return Question(recipe, cfg, int(devices[1]) if devices else 1)


def shown(path: Path) -> str:
    """Return the line that a config shows."""
    [line] = _FIGURES.findall(path.read_text())
    return str(line)


def planned(path: Path) -> str:
    """Return that line as it should be: the largest forward of samples of the longest length, on each card."""
    question = question_of(path)
    forecast = sketch(question, int(question.cfg.tokenizer.max_seq_len)).forecast
    largest = [forecast.largest(gib * GIB) for gib in CARDS]
    return "#   " + ", ".join(f"{gib} GiB: {size or 'none'}" for gib, size in zip(CARDS, largest, strict=True))


def planned_apart(path: Path) -> str:
    """Do as :func:`planned`, in a process of its own, whose memory is given back."""
    return in_a_process(planned, path)


if __name__ == "__main__":
    for path in ADAPTIVE:
        if not sys.argv[1:] or any(part in str(path) for part in sys.argv[1:]):
            path.write_text(_FIGURES.sub(planned_apart(path), path.read_text()))
            print(path.relative_to(FOLDER), shown(path))
