# SPDX-License-Identifier: BSD-3-Clause
"""bench_all.py: what it measures, how it goes on after an interruption, and its command lines."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import bench_all
import pytest
from launcher import signals

from support.repository import ROOT

# It fails in its first call, which leaves an unfinished record.
PROGRAM = """
import json, pathlib, sys
file = pathlib.Path(sys.argv[-1])
runs = json.loads(file.read_text())["runs"] if file.exists() else 0
file.write_text(json.dumps({"commit": sys.argv[1], "runs": runs + 1}))
sys.exit(runs == 0)
"""


class _Checkout:
    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root, self.patch = root, patch
        self.results = root / "results"
        patch.setattr(bench_all, "ROOT", root)
        patch.setattr(bench_all, "RESULTS", self.results)
        patch.setattr(bench_all, "UNFINISHED", root / "build")
        for folder in ("csrc", "include", "python", "benchmarks", "results"):
            (root / folder).mkdir()
        (root / "measure.py").write_text(PROGRAM)
        self._git("init", "--quiet")
        self.change("first")

    def change(self, text: str) -> None:
        """Commits another product."""
        (self.root / "csrc" / "stage.cpp").write_text(text)
        self._git("add", "csrc")
        self._git("-c", "user.name=x", "-c", "user.email=x", "commit", "--quiet", "-m", text)
        command = f"{self.root / 'measure.py'} {self._git('rev-parse', 'HEAD')}"
        measurement = bench_all.Measurement("figures", 90, command)
        self.patch.setattr(bench_all, "PARTS", {"one": [measurement]})

    def _git(self, *words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=self.root, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    def runs(self) -> int:
        found: int = json.loads((self.results / "figures.json").read_text())["runs"]
        return found


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_it_goes_on_until_the_results_are_of_this_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout = _Checkout(tmp_path, monkeypatch)
    with pytest.raises(SystemExit, match="not measured: figures"):
        bench_all.main([])
    assert list(checkout.results.iterdir()) == []
    bench_all.main(["one"])
    assert checkout.runs() == 2
    capsys.readouterr()
    bench_all.main([])  # there is nothing to do
    assert "1.5 hours; to measure: nothing" in capsys.readouterr().out
    assert checkout.runs() == 2

    checkout.change("second")
    bench_all.main(["--list"])
    assert "to measure: figures" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        bench_all.main([])
    checkout.change("third")  # an unfinished record of another product is not gone on with
    with pytest.raises(SystemExit):
        bench_all.main([])
    assert checkout.runs() == 2


def test_an_unknown_part_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_all.main(["clusters"])
    assert "no part clusters; there are stages, cluster, reliability" in capsys.readouterr().err


ALL = [each for part in bench_all.PARTS.values() for each in part]


class _Measured(Exception):
    pass


def _parts(program: Any) -> Iterable[Any]:
    parts = getattr(program, "PARTS", ())
    return parts.values() if isinstance(parts, dict) else ()


@pytest.mark.parametrize("measurement", ALL, ids=lambda each: each.name)
def test_a_program_accepts_its_command_line(
    measurement: bench_all.Measurement, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sklearn")
    name, *words = measurement.command.split()
    program = importlib.import_module(name.removesuffix(".py"))

    def measure(arguments: object) -> None:
        raise _Measured

    for module in (program, *_parts(program)):
        if hasattr(module, "measure"):
            monkeypatch.setattr(module, "measure", measure)
    monkeypatch.setattr(program, "missing", lambda *_, **__: [], raising=False)
    monkeypatch.setattr(signals, "unwind_on_signals", lambda: None)
    picture = ["--picture", "picture.png"] if measurement.picture else []
    monkeypatch.setattr(sys, "argv", [name, *words, "--json", "record.json", *picture])
    with pytest.raises(_Measured):
        program.main()


def test_every_record_of_a_table_is_measured() -> None:
    """A GPU is measured by .ci/gpu, and other people's suites by their tests."""
    quoted = {
        name
        for page in (ROOT / "docs").glob("*.md")
        for name in re.findall(r"<!-- table: .* of (\w+)\.json -->", page.read_text())
    }
    assert quoted - {each.name for each in ALL} == {
        "cluster_h100",
        "other_suites",
        "stages_h100",
    }
