"""The page in a real browser: light and dark, on a desk and on a phone, without a complaint or a request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from adaptive_batching._report.page import write_page
from adaptive_batching._report.record import Report
from tests.support.browser import Browser, browser, chromium
from tests.support.runs import FIRST_VERSION, about, write_run

OVERLAPPING = """
    (() => {
      const boxes = [...document.querySelectorAll("figcaption > *, dt, dd > *, h1, h2, th, td, .u-legend tr, p")]
        .filter(each => each.textContent.trim() && each.getClientRects().length === 1)
        .map(each => [each, each.getBoundingClientRect(), each.closest(".scroll")?.getBoundingClientRect()])
        .map(([each, box, scroll]) => [each, {  // a table that is too wide scrolls
          left: box.left, top: box.top, bottom: box.bottom, right: Math.min(box.right, scroll?.right ?? box.right),
        }]);
      return boxes.flatMap(([a, one]) => boxes.filter(([b, other]) => a !== b && !a.contains(b) && !b.contains(a)
        && one.left + 1 < other.right && other.left + 1 < one.right
        && one.top + 1 < other.bottom && other.top + 1 < one.bottom).map(([b]) => [a.textContent, b.textContent]));
    })()
"""
DESK, PHONE = (1280, 900), (390, 844)
PROGRAM = chromium()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium (Debian: apt-get install chromium)")


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    assert PROGRAM is not None
    with browser(PROGRAM) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of all there is, an error included, one of a record of the first version, and one of both."""
    folder = tmp_path_factory.mktemp("pages")
    report = Report(folder / "run", about=about())
    with pytest.raises(ValueError, match="too long"), report.showing_errors():
        write_run(report, steps=40, ends=False)
        raise ValueError(f"a path that is too long: {'/folder' * 60}")
    paths = {"run": [folder / "run"], "old": [FIRST_VERSION], "both": [folder / "run", FIRST_VERSION]}
    return {name: write_page(records, folder / f"{name}.html") for name, records in paths.items()}


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
@pytest.mark.parametrize("name", ["run", "old", "both"])
def test_it_is_drawn_without_a_complaint_or_a_request(
    name: str, size: tuple[int, int], dark: bool, window: Browser, pages: dict[str, Path]
) -> None:
    window.open(pages[name], size, dark=dark)
    assert window.complaints == []
    assert window.requests == [pages[name].resolve().as_uri()]
    assert window.run("performance.getEntriesByType('resource').length") == 0
    drawn = window.run("[...document.querySelectorAll('.plot')].map(plot => plot.querySelectorAll('canvas').length)")
    assert drawn == [1] * len(drawn) and len(drawn) == {"run": 8, "old": 4, "both": 9}[name]
    fits = "document.documentElement.scrollWidth === document.documentElement.clientWidth"
    assert window.run(fits), "nothing is wider than the window"
    fills = "[...document.querySelectorAll('.plot')].every(plot => plot.firstChild.clientWidth === plot.clientWidth)"
    assert window.run(fills), "each chart is as wide as its place"
    paper = window.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, paper.strip("rgb()").split(","))) < 3 * 64) == dark
    widths = window.run("[...document.querySelectorAll('.charts .plot')].map(plot => plot.clientWidth)")
    in_columns = len({round(width / 10) for width in widths}) > 1
    assert in_columns == (size == DESK), "one column on a phone"
    assert window.run(OVERLAPPING) == [], "no text lies over another"


def test_colours_follow_the_scheme_while_the_page_is_open(window: Browser, pages: dict[str, Path]) -> None:
    window.open(pages["run"], DESK)
    pixels = "[...document.querySelector('.loss canvas').getContext('2d').getImageData(0, 0, 60, 300).data].join()"
    light = window.run(pixels)
    window.set_scheme(dark=True)
    window.settle()
    assert window.run(pixels) != light
    window.set_scheme(dark=False)
    window.settle()
    assert window.run(pixels) == light


def test_charts_are_zoomed_and_read_together(window: Browser, pages: dict[str, Path]) -> None:
    window.open(pages["run"], DESK)
    box = window.run(
        "(() => { const over = document.querySelector('.loss .u-over'); over.scrollIntoView({block: 'center'});"
        " const box = over.getBoundingClientRect(); return [box.left, box.top, box.width, box.height]; })()"
    )
    left, middle, width = box[0], box[1] + box[3] / 2, box[2]
    window.press("mouseMoved", left + 0.5 * width, middle)
    window.settle()
    legends = window.run(
        "[...document.querySelectorAll('.charts .u-legend tr:first-child .u-value')].map(e => e.textContent)"
    )
    assert len(set(legends)) == 1 and legends[0], "all at the same samples"
    canvas = "document.querySelector('.lr canvas').toDataURL()"
    before = window.run(canvas)
    window.press("mousePressed", left + 0.2 * width, middle)
    window.press("mouseMoved", left + 0.6 * width, middle)
    window.press("mouseReleased", left + 0.6 * width, middle)
    window.settle()
    assert window.run(canvas) != before, "another chart is zoomed as well"


def test_the_config_is_copied_and_equal_curves_are_both_seen(
    window: Browser, pages: dict[str, Path], tmp_path: Path
) -> None:
    window.open(pages["run"], DESK)
    window.run("document.querySelector('.copy').click()")
    assert window.run("document.querySelector('.copy').textContent") in ("Copied", "Selected: copy it")
    assert "max_batch_size: 8" in window.run("getSelection().toString()")
    assert window.complaints == []
    for name in "ab":
        write_run(Report(tmp_path / name, about=about()), steps=40)
    window.open(write_page([tmp_path / "a", tmp_path / "b"], tmp_path / "both.html"), DESK)
    reds = """(() => {
        const canvas = document.querySelector(".loss canvas"), {width, height} = canvas;
        const {data} = canvas.getContext("2d").getImageData(0, 0, width, height);
        let seen = [0, 0];
        for (let i = 0; i < data.length; i += 4) {
          if (data[i + 3] < 250) continue;
          seen[0] += data[i] > 170 && data[i + 1] < 110 && data[i + 2] < 40;
          seen[1] += data[i] < 60 && data[i + 2] > 180;
        }
        return seen;
    })()"""
    second, first = window.run(reds)
    assert min(second, first) > 100, "the colour of each"


def test_it_can_be_read_without_javascript(window: Browser, pages: dict[str, Path]) -> None:
    window.run_scripts(on=False)
    window.open(pages["run"], DESK, draws=False)
    words = window.run("document.body.innerText")
    window.run_scripts(on=True)
    assert window.complaints == [] and "The curves need JavaScript" in words
    assert "max_batch_size: 8" in words and "A step of 16 would take about 2 MiB" in words


def test_a_run_of_one_step_is_drawn_as_points(window: Browser, tmp_path: Path) -> None:
    write_run(Report(tmp_path, about=about()), range(1), 1, all_there_is=False, ends=False)
    window.open(write_page([tmp_path]), DESK)
    blue = """(() => {
        const canvas = document.querySelector(".loss canvas"), {width, height} = canvas;
        const {data} = canvas.getContext("2d").getImageData(0, 0, width, height);
        let count = 0;
        for (let at = 0; at < data.length; at += 4) {
            count += data[at + 3] > 200 && data[at + 2] > 150 && data[at] < 100;
        }
        return count;
    })()"""
    assert window.run(blue) > 20
