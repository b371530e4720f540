# SPDX-License-Identifier: BSD-3-Clause
"""Tables, sentences and progress on a terminal. rich draws them if it is installed."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

GAP = 2  # characters between two columns

Report = Callable[[int, int], None]  # takes the number of parts done, and of all parts


@dataclass(frozen=True)
class Table:
    """Rows of text under headings. Only the first column is left-aligned.

    ``str(table)`` never needs rich.

    Attributes:
        headings: the name of each column.
        rows: the cells of each row, which may have several lines.
        totals: the cells of a last row, if there is one.
        marked: the index of a row that a terminal shows in bold.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    totals: Sequence[str] = ()
    marked: int | None = None

    def __str__(self) -> str:
        filled = [row for row in (self.headings, *self.rows, self.totals) if row]
        columns = zip(*filled, strict=True)
        widths = [max(map(len, "\n".join(column).split("\n"))) for column in columns]
        rule = ["-" * width for width in widths]
        above_totals = [rule] if self.totals else []
        rows = [self.headings, rule, *self.rows, *above_totals, self.totals]
        return "\n".join(line for row in rows if row for line in _lines(row, widths))

    def print(self) -> None:
        try:
            from rich import box, table
            from rich.console import Console
        except ImportError:
            print(self)
            return
        drawn = table.Table(
            box=box.SIMPLE,  # It puts a space between two columns.
            padding=(0, GAP - 1, 0, 0),
            show_edge=False,
            pad_edge=False,
            show_footer=bool(self.totals),
        )
        footers = self.totals or [""] * len(self.headings)
        for i, (heading, footer) in enumerate(zip(self.headings, footers, strict=True)):
            drawn.add_column(heading, footer, justify="right" if i else "left", no_wrap=True)
        for i, row in enumerate(self.rows):
            drawn.add_row(*row, style="bold" if i == self.marked else None)
        # In a narrow terminal rich would cut the numbers short.
        Console(highlight=False, markup=False, width=sys.maxsize).print(drawn)


def terminal_width() -> int:
    return shutil.get_terminal_size().columns


def say(text: str, indent: str = "", hanging: str = "") -> None:
    """Prints a text in lines that fit the terminal. ``hanging`` indents all but the first."""
    print(
        textwrap.fill(
            text,
            terminal_width(),
            initial_indent=indent,
            subsequent_indent=hanging,
            break_on_hyphens=False,
        )
    )


@contextlib.contextmanager
def progress(what: str, shown: bool) -> Iterator[Report]:
    """Shows how much is done on stderr, if ``shown`` and stderr is a terminal."""
    if not (shown and sys.stderr.isatty()):
        yield lambda done, parts: None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield lambda done, parts: print(
            f"\r{what}: {done} of {parts}", end="", file=sys.stderr, flush=True
        )
        print(file=sys.stderr)  # The last part may never come.
        return
    # No automatic refresh: its thread would compete with what is measured.
    with Progress(console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, parts: bar.update(task, completed=done, total=parts, refresh=True)


def _lines(row: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    for cells in itertools.zip_longest(*(cell.split("\n") for cell in row), fillvalue=""):
        first, *others = zip(cells, widths, strict=True)
        aligned = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        yield (" " * GAP).join(aligned).rstrip()
