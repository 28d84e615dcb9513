"""A page of a run, taken apart: its tables, its data, and what it refers to."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

UPLOT = Path(__file__).parents[2] / "adaptive_batching" / "_report" / "assets" / "uplot"
_VOID = {"meta", "link", "line", "circle"}


class Page(HTMLParser):
    """The parts of a page that a test looks at."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.tables: dict[str, list[list[list[str]]]] = {}  # of each section, by its anchor: rows of cells
        self.words: dict[str, str] = {}  # of each section
        self.facts: dict[str, str] = {}
        self.codes: list[str] = []
        self.scripts: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []  # (element, attribute, value)
        self._open: list[str] = []
        self._section = ""
        self.feed(text)
        assert not self._open, f"not closed: {self._open}"
        # NaN is not JSON
        self.data: Any = json.loads(self.scripts.pop(0), parse_constant=lambda name: 1 / 0) if self.scripts else None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in _VOID:
            self._open.append(tag)
        if tag == "section":
            self._section = dict(attrs)["id"] or ""
            self.tables[self._section], self.words[self._section] = [], ""
        elif tag == "table":
            self.tables[self._section].append([])
        elif tag == "tr":
            self.tables[self._section][-1].append([])
        elif tag in ("td", "th"):
            self.tables[self._section][-1][-1].append("")
        elif tag == "code":
            self.codes.append("")
        elif tag == "script":
            self.scripts.append("")
        elif tag == "dt":
            self._fact = ""

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID:
            assert self._open.pop() == tag, tag
        if tag == "section":
            self._section = ""

    def handle_data(self, data: str) -> None:
        if not self._open:
            return
        if self._open[-1] == "script":
            self.scripts[-1] += data
        elif "code" in self._open:
            self.codes[-1] += data
        elif self._section:
            self.words[self._section] += data + " "
        if {"td", "th"} & set(self._open):
            self.tables[self._section][-1][-1][-1] += data
        if self._open[-1] == "dt":
            self._fact = data
        elif self._open[-2:] == ["dd", "span"]:
            self.facts[self._fact] = data


def read_page(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def check_that_it_asks_for_nothing(page: Page) -> None:
    assert "default-src 'none'" in page.text
    links = [(tag, value) for tag, name, value in page.attributes if name in ("src", "href", "action", "srcset")]
    assert links == [("link", "data:,")]
    own = page.text.replace((UPLOT / "uPlot.iife.min.js").read_text(), "")
    assert not re.search(r"https?://|//\w+\.\w+/|url\(|@import|fetch\(|XMLHttpRequest|sendBeacon|WebSocket", own)
    assert len(page.text.encode()) < 300_000
