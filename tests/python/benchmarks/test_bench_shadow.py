# SPDX-License-Identifier: BSD-3-Clause
"""benchmarks/bench_shadow.py measures and shows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.repository import ROOT

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
pytest.importorskip("sklearn")

PROGRAM = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "bench_shadow.py")]


def test_errors_and_losses_are_compared(tmp_path: Path) -> None:
    file = tmp_path / "shadow.json"
    subprocess.run([*PROGRAM, "--quick", "--json", str(file)], check=True, timeout=400)
    record = json.loads(file.read_text())
    assert [(run["task"], run["rank"]) for run in record["runs"]] == [
        (task, rank) for task in ("language", "digits", "lstm") for rank in (1, 2, 4, 8, 16, 32)
    ]
    for run in record["runs"]:
        assert all(0 <= error < 2 for error in run["errors"])
    # The tiny models have no weight that rank 32 compresses, and rank 1 leaves most out.
    assert all(run["errors"] < [0.01] for run in record["runs"] if run["rank"] == 32)
    assert all(run["errors"] > [0.1] for run in record["runs"] if run["rank"] == 1)
    shown = subprocess.run(
        [*PROGRAM, "--show", str(file)], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    assert f"correlation of the two: {record['spearman']:.3f}" in shown
    assert shown.count("language") == 6
