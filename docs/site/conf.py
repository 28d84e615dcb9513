"""Sphinx: the pages of the repository as a site, from the same Markdown, with the public interface from docstrings."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import adaptive_batching

project = "adaptive-batching"
copyright = "the adaptive-batching authors"
release = adaptive_batching.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = [
    "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/*.md", "docs/site/api.md",
    "benchmarks/results/*.md",
]  # fmt: skip
html_theme = "furo"
html_title = "adaptive-batching"
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "description"

_CHAPTERS = {
    "Start": ["trainer", "generate", "frameworks", "torchtune", "your-own-loop"],
    "Decide": ["will-it-fit", "how-accurate", "speed-up", "works-with", "comparison"],
    "Understand": [
        "split-the-batch", "several-devices", "survive", "find-the-largest-batch", "grow-the-batch", "report",
    ],
    "torchtune in detail": ["torchtune-commands", "torchtune-differences", "torchtune-validation", "ppo"],
    "Look up": ["faq", "settings", "reference", "site/api", "README", "internals"],
}  # fmt: skip
_OTHERS = ["CHANGELOG", "CONTRIBUTING", "SECURITY"]


def _add_contents(app: Any, name: str, source: list[str]) -> None:
    """Give the first page the contents of the site, which the repository's own has no use for."""
    if name == root_doc:
        chapters = {title: [f"docs/{page}" for page in pages] for title, pages in _CHAPTERS.items()}
        for title, pages in {**chapters, "The project": _OTHERS}.items():
            entries = "\n".join(pages)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{entries}\n```\n"
    elif name.startswith("benchmarks/"):
        source[0] = f"---\norphan: true\n---\n\n{source[0]}"


def _copy_pictures(app: Any, exception: Exception | None) -> None:
    """Copy the pictures that pages name in HTML, by the reader's light or dark mode, which Sphinx does not see."""
    if exception is None:
        shutil.copytree(Path(app.srcdir, "docs/pictures"), Path(app.outdir, "docs/pictures"), dirs_exist_ok=True)


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _add_contents)
    app.connect("build-finished", _copy_pictures)
