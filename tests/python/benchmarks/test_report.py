# SPDX-License-Identifier: BSD-3-Clause
"""report.py: what a record looks like, and the tables."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import report
import torch


def test_a_record_is_json_at_any_time(tmp_path: Path) -> None:
    file = tmp_path / "new" / "results.json"
    for count in range(3):
        report.write({"results": [0] * count}, file)
        assert json.loads(file.read_text()) == {"results": [0] * count}
        assert os.listdir(file.parent) == ["results.json"]
    report.write({}, None)


def test_a_record_has_short_lines_and_rounded_numbers(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    runs = [{"name": f"{n}, [] or {{}}", "ms": [1 / 3] * n, "empty": {}} for n in range(20)]
    record = {"torch": torch.__version__, "runs": runs, "seeds": list(range(100)), "none": None}
    report.write(record, file)
    lines = file.read_text().splitlines()
    assert max(map(len, lines)) <= report.WIDTH
    assert len(lines) < 130  # one value a line takes 400
    assert '    {"name": "1, [] or {}", "ms": [0.333333], "empty": {}},' in lines
    for run in runs:
        run["ms"] = [0.333333] * len(run["ms"])
    assert json.loads(file.read_text()) == record


def test_the_commit_needs_no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POWERSGD_COMMIT", raising=False)
    monkeypatch.setenv("PATH", "")
    assert report.commit() == ""
    monkeypatch.setenv("POWERSGD_COMMIT", "abc1234")
    assert report.commit() == "abc1234"


def test_a_table_is_written_for_the_docs_and_for_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = (["", "ms"], [["plain", "12"], ["ours", ""]])
    assert report.markdown(table) == "| | ms |\n| --- | --- |\n| plain | 12 |\n| ours | |\n"
    report.show(report.provenance("a processor"), {"steps": table}, "4 ranks")
    shown = capsys.readouterr().out
    assert "device a processor" in shown
    assert "4 ranks" in shown
    assert "steps\n       ms\n-----  --\nplain  12\nours\n" in shown


def test_quartiles() -> None:
    assert report.quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == [2.0, 4.0]
    assert report.quartiles([3.0]) == [3.0, 3.0]
