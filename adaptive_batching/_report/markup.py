"""Pieces of HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


class Html(str):
    """Text that is HTML already. What is not, is escaped where it goes into a page."""

    __slots__ = ()


def tag(name: str, *contents: str, **attributes: str) -> Html:
    """Return an element around HTML: ``class_`` is ``class``, ``data_run`` ``data-run``; empty ones are left out."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"' for key, value in attributes.items() if value
    )
    return Html(f"<{name}{given}>{''.join(contents)}</{name}>")


def text(name: str, content: str, **attributes: str) -> Html:
    """Return an element around plain text."""
    return tag(name, escape(content), **attributes)


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    words: Sequence[int] = (),
    caption: str = "",
    class_: str = "",
) -> Html:
    """Return a table of plain text or :class:`Html`, which scrolls by itself where it is too wide.

    Columns in ``words`` hold words; the others hold numbers, and line up at the right.
    """

    def cell(name: str, column: int, content: str, scope: str = "") -> Html:
        inner = content if isinstance(content, Html) else escape(content)
        return tag(name, inner, class_="words" if column in words else "", scope=scope)

    def line(row: Sequence[str]) -> Html:
        first, *others = row
        return tag("tr", cell("th", 0, first, "row"), *(cell("td", at, each) for at, each in enumerate(others, 1)))

    head = tag("thead", tag("tr", *(cell("th", at, each, "col") for at, each in enumerate(header))))
    named = text("caption", caption) if caption else ""
    inside = tag("table", named, head, tag("tbody", *map(line, rows)), class_=class_)
    return tag("div", inside, class_="scroll", tabindex="0", role="region", aria_label=caption or "table")


def key(kind: str) -> Html:
    """Return a spot of colour that stands for something in a picture."""
    return tag("span", class_=f"key {kind}")


def bar(parts: Sequence[tuple[str, float]]) -> Html:
    """Return a bar of parts that lie end to end: (class, share of the whole)."""
    shares = [tag("i", class_=name, style=f"width:{100 * share:.3f}%") for name, share in parts]
    return tag("div", *shares, class_="bar", aria_hidden="true")


def interval(low: float, middle: float, high: float, first: float, last: float, base: float) -> Html:
    """Return a picture of a value and its interval, on an axis from ``first`` to ``last`` with a line at ``base``."""

    def at(value: float) -> str:
        return f"{4 + 192 * (value - first) / (last - first):.1f}"

    lines = (
        f'<line class="base" x1="{at(base)}" x2="{at(base)}" y1="0" y2="20"/>'
        f'<line class="whisker" x1="{at(low)}" x2="{at(high)}" y1="10" y2="10"/>'
        f'<circle cx="{at(middle)}" cy="10" r="4"/>'
    )
    return tag("svg", lines, viewBox="0 0 200 20", class_="interval", aria_hidden="true")
