# SPDX-License-Identifier: BSD-3-Clause
"""The code blocks of Markdown pages, and the comments that say how a test runs them.

CONTRIBUTING.md describes the grammar of the comments, "Documentation".
"""

from __future__ import annotations

import gc
import os
import re
import socket
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support import ranks
from support.repository import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

PROGRAMS = {"python", "diff"}
SHELL = {"bash", "sh"}
# Blocks of these languages are output, pictures or files: nothing in them can be run.
PLAIN = {"text", "mermaid", "bibtex", "yaml", "toml", "json"}
LANGUAGES = PROGRAMS | SHELL | PLAIN

_FENCE = re.compile(r"^( *)(`{3,}|~{3,}) *([\w+-]*)")
_MARK = re.compile(r"^ *<!-- *((?:not )?run\b.*?) *-->$")
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

    def program(self) -> str:
        """The Python source. The program of a diff is its new side."""
        if self.language != "diff":
            return self.code
        lines = [line for line in self.code.splitlines() if not line.startswith(("---", "+++"))]
        kept = [line[1:] for line in lines if not line.startswith(("-", "@@"))]
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
    lines = text.splitlines()
    blocks, marks = [], set()
    number = 0
    while number < len(lines):
        opening = _FENCE.match(lines[number])
        if opening is None:
            _check_indent(lines, number, page)
            number += 1
            continue
        end = number + 1
        while end < len(lines) and lines[end].strip() != opening[2]:
            end += 1
        if end == len(lines):
            raise BadBlock(f"{page}:{number + 1}: the block does not end")
        code = "".join(f"{line[len(opening[1]) :]}\n" for line in lines[number + 1 : end])
        mark = _MARK.match(lines[number - 1]) if number else None
        if mark:
            marks.add(number - 1)
        blocks.append(_block(page, number + 1, opening[3], code, mark[1] if mark else ""))
        number = end + 1
    for number, line in enumerate(lines):
        if _MARK.match(line) and number not in marks:
            raise BadBlock(f"{page}:{number + 1}: the next line does not open a block of code")
    return blocks


def _block(page: str, line: int, language: str, code: str, mark: str) -> Block:
    place = f"{page}:{line}"
    if language not in LANGUAGES:
        known = ", ".join(sorted(LANGUAGES))
        raise BadBlock(f"{place}: the language must be one of {known}, got {language!r}")
    if not mark:
        return Block(page, line, language, code)
    if language in PLAIN:
        raise BadBlock(f"{place}: a block of {language} is never run and needs no comment")
    reason = _NOT_RUN.fullmatch(mark)
    if reason:
        return Block(page, line, language, code, why_not=reason[1])
    run = _RUN.fullmatch(mark)
    if run is None or language in SHELL:
        raise BadBlock(f"{place}: {mark!r} is not a comment of the grammar in CONTRIBUTING.md")
    size = int(run["with"] or run["on"] or 2)
    return Block(page, line, language, code, preamble=run["preamble"] or "", world_size=size)


def _check_indent(lines: list[str], number: int, page: str) -> None:
    """An indented block has no language and no place for a comment: fences are the only form."""
    opens = lines[number].startswith("    ") and (number == 0 or not lines[number - 1].strip())
    before = [line for line in lines[:number] if line.strip() and not line.startswith("  ")]
    if opens and not (before and _LIST_ITEM.match(before[-1])):
        raise BadBlock(f"{page}:{number + 1}: a block of code is indented and not fenced")


def lines_of(text: str, without: set[str]) -> Iterator[tuple[int, str]]:
    """Number and text of each line that is not in a block of one of these languages."""
    fence = language = ""
    for number, line in enumerate(text.splitlines(), 1):
        opening = _FENCE.match(line)
        if fence:
            if language not in without:
                yield number, line
            fence = "" if line.strip() == fence else fence
        elif opening:
            fence, language = opening[2], opening[3]
        else:
            yield number, line


def run_block(block: Block, folder: Path) -> None:
    """Executes a Python block on its ranks, each a process of its own, as torchrun would."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks.run(block.world_size, _run_rank, block, port, str(folder), backend=None, timeout=120)


def _run_rank(rank: int, block: Block, port: int, folder: str) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(block.world_size),
        "LOCAL_WORLD_SIZE": str(block.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    os.chdir(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    if block.preamble:
        from support import doc_preambles

        names |= doc_preambles.names_of(block.preamble)
    # Line numbers in a traceback are those of the page.
    source = "\n" * block.line + block.program()
    exec(compile(source, block.page, "exec"), names)
    # Modules end before their group, as they do in the examples.
    names.clear()
    gc.collect()
