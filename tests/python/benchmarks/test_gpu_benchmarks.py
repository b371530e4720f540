# SPDX-License-Identifier: BSD-3-Clause
"""The benchmarks for GPUs do on a CPU what they can: small cases from end to end."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import bench_stages
import bench_step
import pytest
import torch
import torch.distributed as dist
from stages.tables import stages_on_gpu


def _run(program: Any, words: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["bench", *words.split(), "--json", str(file)])
    program.main()
    record: dict[str, Any] = json.loads(file.read_text())
    return record


def test_a_step_is_timed_with_the_stages_and_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--device cpu --model gpt-1M --batch 1 4 --ranks 2 --caps 25 --repeats 1"
    monkeypatch.setattr(bench_step, "TURNS", 2)
    monkeypatch.setattr(bench_step, "WARMUPS", 1)
    record = _run(bench_step, words, tmp_path / "step.json", monkeypatch)
    cases = [(found["rank"], found["bucket_cap_mb"]) for found in record["results"]]
    assert cases == [(None, 25), (2, 25)]
    assert all(found["ms"] > 0 for found in record["results"])
    assert re.search(r"^rank 2 +25 +\d", capsys.readouterr().out, flags=re.MULTILINE)


def test_the_rows_of_a_run_that_is_cut_off_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = bench_stages.bench

    def bench(case: bench_stages.Case, *arguments: Any) -> dict[str, Any]:
        if case.rank == 4:
            raise KeyboardInterrupt
        return whole(case, *arguments)

    monkeypatch.setattr(bench_stages, "bench", bench)
    file = tmp_path / "stages.json"
    with pytest.raises(KeyboardInterrupt):
        _run(bench_stages, "--models demo --ranks 2 4 --repeats 1", file, monkeypatch)
    dist.destroy_process_group()
    (result,) = json.loads(file.read_text())["results"]
    moved = result["floor_ms"] * result["copy_gbyte_per_s"] * 1e6
    assert moved == pytest.approx(5 * 4 * result["elements"], rel=1e-5)
    monkeypatch.setattr(sys, "argv", ["bench", "--show", str(file)])
    bench_stages.main()
    heading, _, row = capsys.readouterr().out.splitlines()[-3:]
    assert heading.startswith("model ")
    assert row.startswith("demo (9.6 M) ")
    assert len(row) == len(heading)


def test_on_a_gpu_the_hook_is_compared_by_the_time_of_the_host_and_of_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_stages, "is_gpu", lambda device: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    busy = iter([0.5, 6.0, 0.0, 6.0])  # the second time, the profiler does not see our kernels
    monkeypatch.setattr(bench_stages, "gpu_ms", lambda *_: next(busy))
    words = "--models demo --ranks 2 4 --repeats 1"
    record = _run(bench_stages, words, tmp_path / "stages.json", monkeypatch)
    seen, _ = record["results"]
    assert seen["wire_dtype"] == "int8"
    hosts = [seen[contestant]["host_ms"] for contestant in ("hook", "ours")]
    heading, _, *rows = capsys.readouterr().out.splitlines()[-4:]
    assert heading.split()[-2:] == ["host", "GPU"]
    (host, gpu), (_, unseen) = (row.split()[-2:] for row in rows)
    assert float(host) == pytest.approx(hosts[0] / hosts[1], abs=0.06)
    assert (gpu, unseen) == ("12.0", "-")
    headings, table = stages_on_gpu({"results": [seen]})
    assert headings[2:4] == ["stages, GPU ms", "torch's hook, GPU ms"]
    assert table[0][:4] == ["the demo's GPT", "2", "0.50", "6.00"]
    headings, _ = stages_on_gpu(record)
    assert headings[2:] == ["stages, ms", "torch's hook, ms"]
