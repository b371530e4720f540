# SPDX-License-Identifier: BSD-3-Clause
"""A MkDocs hook that adds the files outside docs/ that pages link to."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_OUTSIDE = re.compile(r"\]\(\.\./([^)\s#]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a copy of each file outside docs/ that a page links to."""
    linked = {
        path
        for page in sorted(ROOT.glob("docs/*.md"))
        for path in _OUTSIDE.findall(page.read_text())
    }
    for path in sorted(linked):
        # A missing file is left out, so that the strict build fails at the link.
        if (ROOT / path).is_file():
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points the links to the copies."""
    return _OUTSIDE.sub(r"](\1)", markdown)
