"""The README and the pages of ``docs/``: the blocks and the commands that they show."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import ROOT

README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [README, *DOCS]
PROGRAMS = ("adaptive-batching", "make", "pip", "python", "tune")
FENCED = re.compile(r"^```.*?^```", flags=re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    text: str
    where: str

    @property
    def page(self) -> str:
        return self.where.split(":")[0]

    def __str__(self) -> str:
        return self.where


def blocks(language: str) -> list[Block]:
    """All blocks of a language, or with "" those without one."""
    found = []
    for path in PAGES:
        lines = path.read_text().splitlines()
        fences = [number for number, line in enumerate(lines) if line.startswith("```")]
        for start, end in zip(fences[::2], fences[1::2], strict=True):
            if lines[start] == f"```{language}":
                text = "\n".join(lines[start + 1 : end])
                found.append(Block(language, text, f"{path.relative_to(ROOT)}:{start + 1}"))
    return found


def loops(library: str = "") -> list[str]:
    """The whole training loops among the blocks of Python: those with a library, or with none besides torch."""
    found = [block.text for block in blocks("python") if "AdaptiveStep" in block.text]
    of_library = {text: re.search("^from (accelerate|lightning)", text) for text in found}
    return [text for text, match in of_library.items() if (match[1] if match else "") == library]


def commands() -> Iterator[tuple[str, str]]:
    """Yield (place, command) of each line in a block of bash, without comments."""
    for block in blocks("bash"):
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield block.where, shlex.join(words)


def commands_in_the_text(path: Path) -> Iterator[str]:
    """Yield each command in the running text and the tables of a page; ``tune run`` alone is a name, not a command."""
    for span in re.findall(r"`([^`]+)`", FENCED.sub("", path.read_text())):
        words = span.split()
        program = next((number for number, word in enumerate(words) if "=" not in word), 0)
        if words[program] in PROGRAMS and words[program + 1 :] not in ([], ["run"]):
            yield " ".join(words)
