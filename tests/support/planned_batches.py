"""Plan the configs of this package, and write the batch sizes that fit into their comments::

python -m tests.support.planned_batches [<part of a path> ...]

It takes what ``adaptive-batching plan`` takes: a CUDA build of torch, and g++. A config is planned in a minute or two.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from adaptive_batching._dry_run.cards import find_gpus
from adaptive_batching._torchtune.names import LAUNCHED

FOLDER = Path(__file__).parents[2] / "recipes" / "configs"
ADAPTIVE = sorted(path for path in FOLDER.glob("**/*.yaml") if path.parent.name != "quickstart")
CARDS = [find_gpus(name)[0] for name in ("RTX 4090", "L40S", "H100")]  # sold as 24, 48 and 80 GB
_FIGURES = re.compile(r"^#   RTX 4090 .*$", flags=re.MULTILINE)


@dataclass(frozen=True)
class Launched:
    """The run that a config says it is launched as."""

    recipe: str
    cfg: Any
    devices: int


def request_of(path: Path) -> Launched:
    text = path.read_text()
    [recipe] = re.findall(LAUNCHED, text)
    devices = re.search(r"--nproc_per_node (\d+)", text)
    return Launched(recipe, OmegaConf.load(path), int(devices[1]) if devices else 1)


def shown(path: Path) -> str:
    [line] = _FIGURES.findall(path.read_text())
    return str(line)


def planned(path: Path) -> str:
    """Return the line to show: the largest forward of samples of the longest length on each card, and its hours."""
    cards = [part for card in CARDS for part in ("--gpu", card.name)]
    command = [sys.executable, "-m", "adaptive_batching", "plan", "--json", str(path), *cards]
    plans = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)["gpus"]
    parts = [
        f"{card.name} ({card.memory_gib:.1f} GiB): {_largest(plan)}" for card, plan in zip(CARDS, plans, strict=True)
    ]
    return f"#   {', '.join(parts)}"


def _largest(plan: dict[str, Any]) -> str:
    """Return the largest forward on a card, and the hours of a million tokens in such forwards, if they are known."""
    rate = (plan["time"] or {}).get("tokens_per_second")
    hours = "" if rate is None else f", {10**6 / rate / 3600:.2g} h"
    return f"{plan['largest_micro_batch'] or 'none'}{hours}"


if __name__ == "__main__":
    for path in ADAPTIVE:
        if not sys.argv[1:] or any(part in str(path) for part in sys.argv[1:]):
            line = planned(path)
            path.write_text(_FIGURES.sub(line, path.read_text()))
            print(path.relative_to(FOLDER), line, flush=True)
