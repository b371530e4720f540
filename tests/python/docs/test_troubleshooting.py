# SPDX-License-Identifier: BSD-3-Clause
"""The messages that the pages quote are those of the sources."""

from __future__ import annotations

import re

from markdown_blocks import PAGES

from support.repository import ROOT

# Messages of torch and of the tools around it, which the page explains as well.
OF_OTHERS = (
    "Unknown c10d backend type",
    "Timed out waiting",
    "No backend of type",
    "No matching distribution found",
    "/usr/bin/ld",
)


def _literals(source: str) -> str:
    """A source in which a literal that goes on in the next line is one, without quotes in it."""
    source = re.sub(r"[\"']\s*\n\s*f?[\"']", "", source)
    return " ".join(source.replace('\\"', '"').split())


SOURCES = [
    _literals(path.read_text())
    for folder in ("python", "csrc", "include")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in {".py", ".h", ".cpp", ".cu"}
]


def _are_in_a_source(parts: list[str]) -> bool:
    """True if the fixed parts of a message stand in one source, in their order."""
    pattern = re.compile(".*?".join(map(re.escape, parts)))
    return any(pattern.search(source) for source in SOURCES)


def _explained() -> list[str]:
    """The package's messages in the first column of the page's tables."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = [text for _, text in re.findall(r"^\| (`+)(.+?)\1 \|", page, re.MULTILINE)]
    return [text for text in quoted if not text.startswith(OF_OTHERS)]


def test_explained_messages_exist() -> None:
    explained = _explained()
    assert len(explained) > 20
    fixed = {
        text: [part for part in map(str.strip, text.split("…")) if len(part) > 3]
        for text in explained
    }
    assert [text for text, parts in fixed.items() if not parts or not _are_in_a_source(parts)] == []


def test_log_lines_on_pages_exist() -> None:
    shown = re.compile(r"^(?:torch_powersgd: |[A-Z]+:torch_powersgd:)(.*)", flags=re.MULTILINE)
    lines = [line for page in PAGES for line in shown.findall(page.read_text())]
    assert lines
    # Numbers and their units vary; the longest text between them is the message's.
    vary = re.compile(r"[\d.,:;()'=%]+(?: [kMG]?B\b)?")
    longest = [max(vary.split(line), key=len).strip() for line in lines]
    assert [text for text in longest if not _are_in_a_source([text])] == []


def test_a_message_is_found_across_lines_and_gaps() -> None:
    source = _literals(
        'f"no {x} here, "\n    f"sorry"; c10::str("all ", y, " is"\n "well \\"z\\"")'
    )
    assert "here, sorry" in source
    assert 'iswell "z"' in source
