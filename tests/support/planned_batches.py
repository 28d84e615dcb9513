"""Plan the configs of this package, and write the batch sizes that fit into their comments::

python -m tests.support.planned_batches [<part of a path> ...]
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from adaptive_batching._gpus import Gpu, find_gpus
from adaptive_batching._torchtune.names import LAUNCHED
from adaptive_batching._torchtune.plan.planning import PlanRequest, TracedPlan, sketch
from tests.support.processes import in_a_process

FOLDER = Path(__file__).parents[2] / "recipes" / "configs"
ADAPTIVE = sorted(path for path in FOLDER.glob("**/*.yaml") if path.parent.name != "quickstart")
CARDS = [find_gpus(name)[0] for name in ("RTX 4090", "L40S", "H100")]  # sold as 24, 48 and 80 GB
_FIGURES = re.compile(r"^#   RTX 4090 .*$", flags=re.MULTILINE)


def request_of(path: Path) -> PlanRequest:
    """Return the run that a config says it is launched as."""
    text, cfg = path.read_text(), OmegaConf.load(path)
    [recipe] = re.findall(LAUNCHED, text)
    devices = re.search(r"--nproc_per_node (\d+)", text)
    assert isinstance(cfg, DictConfig)
    return PlanRequest(recipe, cfg, int(devices[1]) if devices else 1)


def shown(path: Path) -> str:
    [line] = _FIGURES.findall(path.read_text())
    return str(line)


def planned(path: Path) -> str:
    """Return the line to show: the largest forward of samples of the longest length on each card, and its hours."""
    request = replace(request_of(path), tells_time=True)
    plan = replace(sketch(request, int(request.cfg.tokenizer.max_seq_len)), probes=True)
    return f"#   {', '.join(f'{gpu.name} ({gpu.memory_gib:.1f} GiB): {_largest(plan, gpu)}' for gpu in CARDS)}"


def _largest(plan: TracedPlan, gpu: Gpu) -> str:
    """Return the largest forward on a card, and the hours of a million tokens in such forwards, if they are known."""
    time = plan.time_on(gpu)
    hours = "" if isinstance(time, str) else f", {10**6 / time.tokens_per_second / 3600:.2g} h"
    return f"{plan.forecast.largest(gpu.memory_bytes) or 'none'}{hours}"


def planned_apart(path: Path) -> str:
    return in_a_process(planned, path)


if __name__ == "__main__":
    for path in ADAPTIVE:
        if not sys.argv[1:] or any(part in str(path) for part in sys.argv[1:]):
            path.write_text(_FIGURES.sub(planned_apart(path), path.read_text()))
            print(path.relative_to(FOLDER), shown(path))
