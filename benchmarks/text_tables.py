# SPDX-License-Identifier: BSD-3-Clause
"""Tables of results, which benchmarks print and docs/_tables.py writes into pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

Table = tuple[Sequence[str], Sequence[Sequence[str]]]  # headings and rows


def print_tables(console: Console, tables: Mapping[str, Table]) -> None:
    """Prints tables by their titles. All columns but the first are aligned on the right."""
    from rich import table

    for title, (headings, rows) in tables.items():
        printed = table.Table(title=title, title_justify="left")
        for i, text in enumerate(headings):
            printed.add_column(text, justify="right" if i else "left")
        for row in rows:
            printed.add_row(*row)
        console.print(printed)
