# SPDX-License-Identifier: BSD-3-Clause
"""The code blocks of Markdown pages, and the comments that say how a test runs them.

CONTRIBUTING.md describes the grammar of the comments, "Documentation".
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support import launch
from support.repository import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

PROGRAMS = {"python", "diff"}
SHELL = {"bash", "sh"}
# Blocks of these languages are output, pictures or files: nothing in them can be run.
PLAIN = {"text", "mermaid", "bibtex", "yaml", "toml", "json"}
LANGUAGES = PROGRAMS | SHELL | PLAIN

_BLOCK = re.compile(
    r"^(?: *<!-- *(?P<mark>(?:not )?run\b[^\n]*?) *-->\n)?"
    r"(?P<indent> *)(?P<fence>`{3,}) *(?P<language>[\w+-]*)\n(?P<code>.*?)^ *(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)
_NOT_RUN = re.compile(r"not run: (\S+(?: \S+)+)")
_RUN = re.compile(r"run with: (?P<preamble>[a-z_]+)(?:, (?P<with>\d) ranks)?|run: (?P<on>\d) ranks")
_LIST_ITEM = re.compile(r"^ *([-*+]|\d+\.) ")


class BadBlock(Exception):
    """A block without a known language, or a comment that does not follow the grammar."""


@dataclass(frozen=True)
class Block:
    """A fenced block of code."""

    page: str
    line: int  # of the opening fence, from 1
    language: str
    code: str
    why_not: str = ""  # the reason why no test runs it
    preamble: str = ""
    world_size: int = 2

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    def program(self, dropped: str = "-") -> str:
        """The Python source. That of a diff is its new side; without "+" it is the old one."""
        if self.language != "diff":
            return self.code
        lines = [line for line in self.code.splitlines() if not line.startswith(("---", "+++"))]
        kept = [line[1:] for line in lines if not line.startswith((dropped, "@@"))]
        return textwrap.dedent("\n".join([*kept, ""]))


def blocks_of_page(page: Path) -> list[Block]:
    """The blocks of a page of the project.

    Raises:
        BadBlock: if one does not follow the grammar.
    """
    return blocks_of(page.read_text(), str(page.relative_to(ROOT)))


def blocks_of(text: str, page: str) -> list[Block]:
    """The blocks of a text.

    Raises:
        BadBlock: if one does not follow the grammar.
    """
    for number, fault in _faults(prose_of(text).splitlines()):
        raise BadBlock(f"{page}:{number}: {fault}")
    blocks = []
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start("fence")) + 1
        code = re.sub(rf"^{found['indent']}", "", found["code"], flags=re.MULTILINE)
        blocks.append(_block(page, line, found["language"], code, found["mark"] or ""))
    return blocks


def prose_of(text: str) -> str:
    """The text with empty lines instead of its blocks."""
    return _BLOCK.sub(lambda block: "\n" * block[0].count("\n"), text)


def _faults(prose: list[str]) -> Iterator[tuple[int, str]]:
    """The lines outside of blocks that belong to one, or look as if they did."""
    for i, line in enumerate(prose):
        if line.lstrip().startswith(("```", "~~~")):
            yield i + 1, "the block does not end, or has more than a language on its first line"
        if re.match(r" *<!-- *(not )?run\b", line):
            yield i + 1, "the next line does not open a block of code"
        # An indented block has no language and no place for a comment.
        opens = line.startswith("    ") and (i == 0 or not prose[i - 1].strip())
        before = [each for each in prose[:i] if each.strip() and not each.startswith("  ")]
        if opens and not (before and _LIST_ITEM.match(before[-1])):
            yield i + 1, "a block of code is indented and not fenced"


def _block(page: str, line: int, language: str, code: str, mark: str) -> Block:
    place = f"{page}:{line}"
    if language not in LANGUAGES:
        known = ", ".join(sorted(LANGUAGES))
        raise BadBlock(f"{place}: the language must be one of {known}, got {language!r}")
    if not mark:
        return Block(page, line, language, code)
    if language in PLAIN:
        raise BadBlock(f"{place}: a block of {language} is never run and needs no comment")
    if reason := _NOT_RUN.fullmatch(mark):
        return Block(page, line, language, code, why_not=reason[1])
    run = _RUN.fullmatch(mark)
    if run is None or language in SHELL:
        raise BadBlock(f"{place}: {mark!r} is not a comment of the grammar in CONTRIBUTING.md")
    size = int(run["with"] or run["on"] or 2)
    return Block(page, line, language, code, preamble=run["preamble"] or "", world_size=size)


def run_block(block: Block, folder: Path) -> None:
    """Executes a block of Python on its ranks."""
    launch.run(block.world_size, _execute, block, folder=folder)


def _execute(block: Block) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    if block.preamble:
        import preambles

        names |= preambles.PREAMBLES[block.preamble]()
    # Line numbers in a traceback are those of the page.
    exec(compile("\n" * block.line + block.program(), block.page, "exec"), names)
    names.clear()
