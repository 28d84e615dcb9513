"""Render the table of settings from their dataclass. To write it to docs/settings.md, run this module::

python -m tests.support.settings_table
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

from adaptive_batching._config import LR_SCALINGS, AdaptiveBatchingConfig
from adaptive_batching._probe.search import SEARCHES
from adaptive_batching._torchtune.train.settings import FIELDS
from adaptive_batching._transformers.arguments import ONLY_IN_RECIPES

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"
_START, _END = "<!-- from AdaptiveBatchingConfig -->\n", "<!-- end -->"

_NUMBER = "1 or more"
_MEMORY = '`"40GiB"`, `"90%"`, GiB'
_VALUES = {
    "batch_increase_function": '`"pkg.module.function"`, `{_component_: pkg.module.factory, ...arguments}`',
    "micro_batch_size": f"{_NUMBER}, `auto`, `explore` (recipes only)",
    "save_every_n_steps": _NUMBER,
    "search": ", ".join(f"`{name}`" for name in SEARCHES if name != AdaptiveBatchingConfig.search),
    "max_batch_size": _NUMBER,
    "memory_limit": _MEMORY,
    "headroom": '`"2GiB"`, `"5%"`, GiB',
    "sequence_length": _NUMBER,
    "increase_every": "a part of one, such as `0.25`",
    "lr_scaling": ", ".join(f"`{name}`" for name in LR_SCALINGS[1:]) + " (`linear` for SGD, else `sqrt`)",
    "max_lr_scale": _NUMBER,
    "recover_from_oom": "`True`, `False`",
    "audit_every": _NUMBER,
    "report_dir": "a path",
}
_DEFAULTS = {"report_dir": "${output_dir}/adaptive_batching"}  # of the recipes


def table() -> str:
    """Return the table in Markdown, one row for each setting."""
    rows = ["| setting | values, default first | what it does |", "|---|---|---|"]
    docstrings = _docstrings()
    for name, default in vars(AdaptiveBatchingConfig()).items():
        setting = name if name in FIELDS else f"adaptive_batching.{name}"
        others = f"`{not default}`" if isinstance(default, bool) else _VALUES[name]
        shown = _DEFAULTS.get(name) or ("null" if default is None else default)
        where = " Recipes only." if name in ONLY_IN_RECIPES else ""
        rows.append(f"| `{setting}` | `{shown}`, {others} | {_markdown(docstrings[name])}{where} |")
    return "\n".join(rows) + "\n"


def page() -> str:
    before, rest = PAGE.read_text().split(_START)
    return f"{before}{_START}{table()}{_END}{rest.split(_END)[1]}"


def _docstrings() -> dict[str, str]:
    """Return the text under each field of the dataclass."""
    [definition] = ast.parse(inspect.getsource(AdaptiveBatchingConfig)).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, text in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            found[field.target.id] = " ".join(str(text.value.value).split())
    return found


def _markdown(text: str) -> str:
    """Turn reStructuredText roles and literals into Markdown, and None into what a YAML says."""
    text = re.sub(r":\w+:`([^`]*)`", r"`\1`", text).replace("``", "`").replace("|", r"\|")
    return re.sub(r"\bNone\b", "Null", text)


if __name__ == "__main__":
    PAGE.write_text(page())
