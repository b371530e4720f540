# SPDX-License-Identifier: BSD-3-Clause
"""A hook of MkDocs: the site also has the files outside of docs/ that pages link to."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_OUTSIDE = re.compile(r"\]\(\.\./([^)\s#]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a copy of each file that a page links to outside of docs/."""
    linked = {
        path
        for page in sorted(ROOT.glob("docs/*.md"))
        for path in _OUTSIDE.findall(page.read_text())
    }
    for path in sorted(linked):
        # A file that does not exist is left out, and the strict build fails at the link.
        if (ROOT / path).is_file():
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lets the links lead to the copies."""
    return _OUTSIDE.sub(r"](\1)", markdown)
