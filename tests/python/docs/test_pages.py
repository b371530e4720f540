# SPDX-License-Identifier: BSD-3-Clause
"""The pages of README and docs: links and tests exist, what programs make is up to date."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
from markdown_blocks import PAGES, prose_of

import torch_powersgd
from support.repository import ROOT

DOCS = ROOT / "docs"
MARKDOWN = sorted({*PAGES, *ROOT.glob("*.md")})


def _anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as repository hosts and the site both make them."""
    anchors = set()
    for heading in re.findall(r"^#+ (.*)", prose_of(text), re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", heading).lower()
        anchors.add(re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-"))
    return anchors


def _dead_links(text: str, folder: Path) -> list[str]:
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose_of(text))):
        if re.match(r"\w+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = folder / name
        page = path.read_text() if name.endswith(".md") and path.exists() else text
        if (name and not path.exists()) or (anchor and anchor not in _anchors(page)):
            dead.append(target)
    return dead


def _unknown_tests(text: str) -> list[str]:
    """The files of tests that a page names and that do not exist."""
    known = {path.name for path in (ROOT / "tests").rglob("test_*")}
    return [name for name in re.findall(r"\btest_\w+\.(?:py|cpp)\b", text) if name not in known]


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: page.name)
def test_links_lead_somewhere_and_named_tests_exist(page: Path) -> None:
    assert _dead_links(page.read_text(), page.parent) == []
    assert _unknown_tests(page.read_text()) == []


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# A `title`, or *two*\n")
    text = "# Here\n[a](there.md#a-title-or-two) [b](#here) [c](gone.md) [d](there.md#no) [e](#x)\n"
    assert _dead_links(text, tmp_path) == ["gone.md", "there.md#no", "#x"]


def test_an_unknown_test_is_found() -> None:
    assert _unknown_tests("`test_pages.py`, `tests/cpp/test_gone.cpp`") == ["test_gone.cpp"]


@pytest.mark.parametrize(
    ("page", "program"),
    [
        ("options", ["_options.py"]),
        ("api", ["_api.py"]),
        ("performance", ["_tables.py", "performance"]),
        ("convergence", ["_tables.py", "convergence"]),
        ("scaling", ["_tables.py", "scaling"]),
        ("reliability", ["_tables.py", "reliability"]),
        ("local-steps", ["_tables.py", "local-steps"]),
    ],
)
def test_a_page_is_what_its_program_makes(
    page: str,
    program: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", program)
    runpy.run_path(str(DOCS / program[0]), run_name="__main__")
    remedy = f"python docs/{program[0]} --write"
    assert (DOCS / f"{page}.md").read_text() == capsys.readouterr().out, remedy


def test_the_api_page_has_every_public_name() -> None:
    page = (DOCS / "api.md").read_text()
    names = {*torch_powersgd.__all__} - {"__version__"}
    shown = re.findall(r"^::: torch_powersgd\.(?:\w+\.)?(\w+)$", page, flags=re.MULTILINE)
    assert sorted(shown) == sorted(names)


def test_the_site_has_directives_where_a_clone_has_tables() -> None:
    page = (DOCS / "api.md").read_text()
    for_site = runpy.run_path(str(DOCS / "_api.py"))["on_page_markdown"](page)
    assert for_site.count("\n::: ") == page.count("\n::: ")
    assert "<!--" not in for_site
    assert "\n|" not in for_site
