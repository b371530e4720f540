# SPDX-License-Identifier: BSD-3-Clause
"""The tables, texts and progress of the commands, with rich and without."""

from __future__ import annotations

import io
import re
import sys

import pytest

from torch_powersgd.cli.tables import Table, progress, say

TABLE = Table(
    ("name", "number\nof all"),
    [("short", "1"), ("a name\n.of two lines", "1000"), ("[bold] is no markup", "")],
    ("all", "1001"),
    marked=1,
)


def _without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("rich", "rich.console", "rich.progress"):
        monkeypatch.setitem(sys.modules, name, None)


def test_a_plain_table_is_aligned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _without_rich(monkeypatch)
    TABLE.print()
    assert capsys.readouterr().out.splitlines() == [
        "name                 number",
        "                     of all",
        "-------------------  ------",
        "short                     1",
        "a name                 1000",
        ".of two lines",
        "[bold] is no markup",
        "-------------------  ------",
        "all                    1001",
    ]


def test_rich_shows_the_same_words(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    TABLE.print()
    shown = capsys.readouterr().out
    assert sorted(re.findall(r"[^\s─-]+", shown)) == sorted(re.findall(r"[^\s-]+", str(TABLE)))


def test_a_text_fits_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "16")
    say("name  one-word two three", indent="  ", hanging=" " * 8)
    assert capsys.readouterr().out.splitlines() == [
        "  name  one-word",
        "        two",
        "        three",
    ]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("with_rich", [True, False])
def test_progress_is_shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch, with_rich: bool) -> None:
    if with_rich:
        pytest.importorskip("rich")
    else:
        _without_rich(monkeypatch)
    for stream, shown in ((_Terminal(), True), (_Terminal(), False), (io.StringIO(), True)):
        monkeypatch.setattr(sys, "stderr", stream)
        with progress("measuring", shown) as report:
            report(1, 3)
            report(2, 3)  # It may end before the last part.
        assert ("measuring" in stream.getvalue()) == (shown and stream.isatty())
        if not with_rich and stream.getvalue():
            assert stream.getvalue().endswith(" 2 of 3\n")
