# SPDX-License-Identifier: BSD-3-Clause
"""python -m torch_powersgd plan: what would be compressed, and how far."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import torch_powersgd.__main__

MODULE = """
import torch

def model():
    return torch.nn.Sequential(
        torch.nn.Conv2d(16, 32, 3), torch.nn.Flatten(), torch.nn.Linear(128, 1000, bias=False)
    )

def nothing():
    return None

def broken():
    raise ValueError("the factory's own error")

constant = 3
"""

# At rank 4: 1000 x 128 and 32 x 144 as factors, the bias raw.
TOTAL = 128_000 + 4608 + 32
SENT = 4 * 1128 + 4 * 176 + 32


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "models_of_test.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("COLUMNS", "160")
    yield tmp_path
    sys.modules.pop("models_of_test", None)


def _run(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["torch_powersgd", *arguments])
    return torch_powersgd.__main__.main()


def _rows(table: str) -> dict[str, list[str]]:
    """The cells of each row by its first."""
    rows = [[cell.strip() for cell in re.split("[│┃|]", line)[1:-1]] for line in table.splitlines()]
    return {row[0]: row[1:] for row in rows if row}


def test_prints_the_plan(folder, monkeypatch, capsys):
    pytest.importorskip("rich", reason="the table is printed by rich")
    assert _run(monkeypatch, "plan", "models_of_test:model", "--rank", "4") == 0
    printed = capsys.readouterr().out
    assert "The largest that stay raw: 0.bias (32)" in printed
    rows = _rows(printed)
    assert rows["2.weight"] == [
        "1000 x 128", "1000 x 128 at rank 4", "128,000", "4,512", f"{128_000 / 4512:.1f}", "18,048"
    ]  # fmt: skip
    assert rows["0.weight"] == [
        "32 x 16 x 3 x 3", "32 x 144 at rank 4", "4,608", "704", f"{4608 / 704:.1f}", "2,816"
    ]  # fmt: skip
    assert rows["0.bias"] == ["32", "raw", "32", "32", "1.0", "128"]
    assert rows["all"] == [
        "",
        "",
        f"{TOTAL:,}",
        f"{SENT:,}",
        f"{TOTAL / SENT:.1f}",
        f"{4 * SENT:,}",
    ]
    assert len(rows) == 5, "with the headings"


def test_the_least_compression_rate(folder, monkeypatch, capsys):
    pytest.importorskip("rich", reason="the table is printed by rich")
    arguments = ("--rank", "4", "--min-compression-rate", "10")
    assert _run(monkeypatch, "plan", "models_of_test:model", *arguments) == 0
    rows = _rows(capsys.readouterr().out)
    assert rows["0.weight"][1] == "raw"
    assert rows["2.weight"][1] == "1000 x 128 at rank 4"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["models_of_test"], "MODULE:FACTORY.*'models_of_test'"),
        (["models_of_test:"], "MODULE:FACTORY"),
        ([":model"], "MODULE:FACTORY"),
        (["no_such_module:model"], "no_such_module"),
        (["models_of_test:no_such_factory"], "no_such_factory"),
        (["models_of_test:nothing"], "torch.nn.Module, got NoneType"),
        (["models_of_test:constant"], "constant.*int"),
        (["models_of_test:model", "--rank", "0"], "matrix_approximation_rank.*got 0"),
        (["models_of_test:model", "--rank", "four"], "four"),
        (["models_of_test:model", "--min-compression-rate", "nan"], "min_compression_rate"),
        ([], "MODULE:FACTORY"),
    ],
)
def test_a_wrong_argument_is_a_usage_error(folder, monkeypatch, capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        _run(monkeypatch, "plan", *arguments)
    assert ended.value.code == 2
    assert re.search(message, capsys.readouterr().err, re.DOTALL)


def test_the_factorys_own_error_is_not_hidden(folder, monkeypatch, capsys):
    try:
        _run(monkeypatch, "plan", "models_of_test:broken")
    except (SystemExit, ValueError) as error:
        told = str(error) + capsys.readouterr().err
    assert "the factory's own error" in told


def test_rich_is_asked_for_where_it_is_not(folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(SystemExit) as ended:
        _run(monkeypatch, "plan", "models_of_test:model")
    assert ended.value.code == 2
    assert "rich" in capsys.readouterr().err


def test_as_a_program(folder):
    command = [sys.executable, "-m", "torch_powersgd", "plan", "models_of_test:nothing"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "usage: python -m torch_powersgd" in ended.stderr
    assert "Traceback" not in ended.stderr
