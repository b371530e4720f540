# SPDX-License-Identifier: BSD-3-Clause
"""The examples train, and benchmarks/bench_convergence.py and bench_noniid.py measure them."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.repository import ROOT
from support.torchrun import torchrun

for package in ("matplotlib", "rich", "sklearn"):
    pytest.importorskip(package)

OURS = "ours, attached"
HOOK = "torch's PowerSGD hook, one bucket"


def _measure(program: str, folder: Path, *options: str) -> list[dict[str, Any]]:
    output, picture = folder / "result.json", folder / "picture.png"
    script = [sys.executable, str(ROOT / "benchmarks" / program), "--quick"]
    files = ["--json", str(output), "--picture", str(picture)]
    subprocess.run([*script, *files, *options], check=True, timeout=400)
    assert picture.stat().st_size > 0
    runs: list[dict[str, Any]] = json.loads(output.read_text())["runs"]
    return runs


def test_every_method_learns_every_task(tmp_path: Path) -> None:
    runs = _measure("bench_convergence.py", tmp_path)
    by_name = {(run["task"], run["method"]): run for run in runs}
    methods = (
        "plain all-reduce",
        "torch's fp16 hook",
        f"{HOOK}, rank 1",
        f"{OURS}, rank 1",
        "ours, bf16 wire, rank 16",
    )
    tasks = ("language", "digits")
    assert set(by_name) == {(task, method) for task in tasks for method in methods}
    for run in runs:
        assert run["validation_loss"][-1] < run["validation_loss"][0], run
    for task in tasks:
        plain, fp16, _, ours, _ = (by_name[task, method] for method in methods)
        # Each of two ranks sends the whole payload, and Gloo's headers: 64 bytes for each of some
        # tens of segments.
        size = plain["gradient_bytes"]
        assert size <= plain["bytes_sent_per_step"] < size + 10_000
        assert size / 2 <= fp16["bytes_sent_per_step"] < size / 2 + 10_000
        assert ours["bytes_sent_per_step"] < size / 10


def test_a_measurement_resumes_with_other_methods(tmp_path: Path) -> None:
    """The file's runs stay as they are, and a file of another task's arguments is refused."""
    options = ("--tasks", "digits", "--resume", "--methods")
    first = _measure("bench_convergence.py", tmp_path, *options, "plain", "bf16-wire:2")
    runs = _measure("bench_convergence.py", tmp_path, *options, "bf16-wire", "--ranks", "2", "4")
    assert runs[: len(first)] == first
    names = ["plain all-reduce", "ours, bf16 wire, rank 2", "ours, bf16 wire, rank 4"]
    assert [run["method"] for run in runs] == names
    assert [run["rank"] for run in runs] == [None, 2, 4]

    script = [sys.executable, str(ROOT / "benchmarks" / "bench_convergence.py"), "--markdown"]
    shown = subprocess.run(
        [*script, "--show", str(tmp_path / "result.json")],
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
    ).stdout
    for name in names:
        assert f"| {name} |" in shown

    record = json.loads((tmp_path / "result.json").read_text())
    record["tasks"]["digits"]["arguments"] = "--steps 1000000"
    (tmp_path / "other.json").write_text(json.dumps(record))
    refused = subprocess.run(
        [*script, *options, "plain", "--quick", "--json", str(tmp_path / "other.json")],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert refused.returncode == 1
    assert "has other settings: digits is" in refused.stderr


def test_unlike_data_keep_our_residual_bounded(tmp_path: Path) -> None:
    runs = _measure("bench_noniid.py", tmp_path)
    by_name = {(run["method"], run["dtype"]): run for run in runs}
    methods, dtypes = ("plain", "hook-1-bucket", "attached"), ("float32", "bfloat16")
    assert set(by_name) == {(method, dtype) for method in methods for dtype in dtypes}
    for dtype in dtypes:
        run = by_name["attached", dtype]
        # Rank 2 serves 2 of 16 dimensions a step. Twice the 8 steps of a turn is the bound, as in
        # test_identity.py.
        assert 0 < max(ratio for ratio in run["ratio"] if ratio is not None) < 2 * 16 / 2
        assert run["distance"][-1] < run["distance"][0] / 2


@pytest.mark.parametrize("example", ["train_lm", "train_digits"])
def test_an_example_has_the_recommended_setting(
    example: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    arguments = importlib.import_module(example).options().parse_args([])
    assert (arguments.rank, arguments.wire_dtype) == (16, "bfloat16")
    assert arguments.exact_steps < arguments.steps / 20


def test_the_digits_example_saves_and_resumes(tmp_path: Path) -> None:
    metrics, checkpoint = tmp_path / "metrics.jsonl", tmp_path / "checkpoint.pt"
    script = [ROOT / "examples" / "train_digits.py", "--channels", 32, "--exact-steps", 3]
    files = ["--metrics", metrics, "--checkpoint", checkpoint]
    for steps in (5, 8):
        result = torchrun(*script, *files, "--steps", steps)
        assert "validation accuracy" in result.stdout
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 9))
    sent = [record["bytes_sent"] for record in records]
    by_step = [after - before for before, after in zip([0, *sent], sent, strict=False)]
    # A resumed run goes on from its step: the exact steps are the first three of all.
    assert by_step[:3] == [by_step[0]] * 3
    assert by_step[3:] == [by_step[3]] * 5
    assert 0 < by_step[3] < by_step[0] / 8
