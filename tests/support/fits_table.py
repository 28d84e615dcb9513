"""Render the table of configs and cards from comments of configs. To write it to README.md, run this module::

python -m tests.support.fits_table
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.planned_batches import ADAPTIVE, FOLDER, request_of, shown

PAGE = Path(__file__).parents[2] / "README.md"
_CELL = r": (\w+)(?:, ([0-9.e-]+) h)?"
_START, _END = "<!-- from recipes/configs -->\n", "<!-- end -->"


def table() -> str:
    """Return the table in Markdown, one row for each config of one device."""
    rows, heads = [], ""
    for path in ADAPTIVE:
        request, line = request_of(path), shown(path)
        if request.devices == 1:
            name = path.relative_to(FOLDER).with_suffix("").as_posix().removesuffix("_adaptive")
            largest = [f"{size} ({hours})" if hours else size for size, hours in re.findall(_CELL, line)]
            heads = " | ".join(re.findall(r"(?:^#   |, )([A-Z].*?) \(", line))
            rows.append(f"| `{name}` | {request.cfg.tokenizer.max_seq_len} | {' | '.join(largest)} |")
    return "\n".join([f"| config, `..._adaptive` | tokens | {heads} |", "|---" * 5 + "|", *rows]) + "\n"


def page() -> str:
    before, rest = PAGE.read_text().split(_START)
    return f"{before}{_START}{table()}{_END}{rest.split(_END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page())
