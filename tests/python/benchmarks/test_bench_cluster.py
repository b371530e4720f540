# SPDX-License-Identifier: BSD-3-Clause
"""bench_cluster.py: its arguments, and its runs on shaped links."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from support.repository import ROOT

pytest.importorskip("matplotlib")
pytest.importorskip("rich")

import bench_cluster
import report
import shapes
from cluster import hosts, launch, models

import torch_powersgd as tp
from support.shaped_links import needs_hosts, needs_taps

BENCHMARKS = ROOT / "benchmarks"


@pytest.mark.parametrize(
    ("rate", "value"), [("100mbit", 1e8), ("2.5gbit", 2.5e9), ("500kbit", 5e5)]
)
def test_a_rate_is_read_as_tc_does(rate: str, value: float) -> None:
    assert hosts.bits_per_second(rate) == value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rates", "fast"], "a rate is a number and kbit, mbit or gbit (1gbit), got 'fast'"),
        (["--rates", "0mbit"], "got '0mbit'"),
        (["--delays", "soon"], "--delays: milliseconds of at least 0, got 'soon'"),
        (["--ranks", "1"], "--ranks: an integer of at least 2, got '1'"),
        (["--steps", "many"], "--steps: an integer of at least 2, got 'many'"),
        (["--methods", "carrier-pigeon"], "invalid choice: 'carrier-pigeon'"),
        (["--methods", "plain:4"], "plain has no rank, got 'plain:4'"),
        (["--methods", "bf16-wire:8,0"], "integers of at least 1, got 'bf16-wire:8,0'"),
        (["--methods", "bf16-wire:"], "integers of at least 1, got 'bf16-wire:'"),
    ],
)
def test_a_bad_argument_is_named(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_cluster.py", *arguments])
    with pytest.raises(SystemExit):
        bench_cluster.parse_arguments()
    assert message in capsys.readouterr().err


def test_each_method_has_its_own_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    methods = ["plain", "hook-1-bucket:4", "bf16-wire:8,16", "attached", "bf16-wire:16"]
    monkeypatch.setattr(sys, "argv", ["bench", "--methods", *methods, "--rank", "2", "4"])
    names = [contender.name for contender in bench_cluster.parse_arguments().contenders]
    own = ["plain", "hook-1-bucket:4", "bf16-wire:8", "bf16-wire:16"]
    assert names == [*own, "attached:2", "attached:4"]
    titles = {
        contender.name: contender.title for contender in bench_cluster.parse_arguments().contenders
    }
    assert titles["bf16-wire:16"] == "ours, bf16 wire, rank 16"
    assert titles["plain"] == "plain all-reduce"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_default_options_are_compared(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--device", device])
    arguments = bench_cluster.parse_arguments()
    names = [contender.name for contender in arguments.contenders]
    defaults = tp.Options()
    name = f"{defaults.wire_dtype}-wire:{defaults.matrix_approximation_rank}"
    assert name in names
    assert arguments.pictured[-1].name == name


def test_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "argv", ["bench_cluster.py", "--device", "cuda"])
    with pytest.raises(SystemExit) as ended:
        bench_cluster.main()
    for thing in ("root", "the program ip", "the program tc", "the program nvidia-cuda-mps"):
        assert thing in str(ended.value)


class _Cluster:
    """Hosts whose first process sleeps and whose second fails."""

    def __init__(self) -> None:
        self.slept_when_killed = False

    def __len__(self) -> int:
        return 2

    def start(
        self, host: int, command: list[str], env: dict[str, str], **popen: Any
    ) -> subprocess.Popen[Any]:
        program = ["false"] if host else ["sleep", "60"]
        return subprocess.Popen(program, stdin=popen.get("stdin"), text=True)

    def kill(self, processes: list[subprocess.Popen[Any]]) -> None:
        self.slept_when_killed = processes[0].poll() is None
        for process in processes:
            process.kill()
            process.wait()


def test_advise_ends_with_the_first_rank_that_fails() -> None:
    cluster: Any = _Cluster()
    job = {"model": "demo", "device": "cpu"}
    assert launch.advised(cluster, {}, 60, ["attached:4"], **job) == {}
    assert cluster.slept_when_killed


def test_the_logs_of_ranks_that_fail_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_GRACE_SECONDS", 0)
    cluster: Any = _Cluster()
    ranks = launch.Ranks(
        cluster, {}, 60, 1, tmp_path, method="plain", model="demo", device="cpu", approximation=0
    )
    run = ranks.turn(2)
    assert len(run.failures) == launch.ATTEMPTS
    kept = sorted(tmp_path.glob("demo-plain-*/log*"))
    assert [log.name for log in kept] == ["log0", "log1"] * launch.ATTEMPTS


def test_the_table_needs_no_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = {**dict.fromkeys(report.PROVENANCE, "-"), "settings": [], "left_out": {"X": "why"}}
    (tmp_path / "record.json").write_text(json.dumps(record))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "cluster.pictures", raising=False)
    monkeypatch.setattr(sys, "argv", ["bench", "--show", str(tmp_path / "record.json")])
    bench_cluster.main()
    assert "left out: X: why" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("demo", shapes.demo_gpt()),
        ("gpt2", shapes.gpt(12, 768, 50257, 1024, bias=False)),
        ("resnet50", shapes.resnet50()),
    ],
)
def test_models_are_of_the_published_shapes(model: str, expected: list[shapes.Shape]) -> None:
    with torch.device("meta"):
        made = models.TASKS[model].make()
    assert [tuple(parameter.shape) for parameter in made.parameters()] == expected


@needs_hosts
def test_measures_what_is_sent(tmp_path: Path) -> None:
    """With two ranks, a ring all-reduce sends every gradient once."""
    output = tmp_path / "record.json"
    script = [sys.executable, str(BENCHMARKS / "bench_cluster.py"), "--quick"]
    methods = ["none", "ddp-alone", "plain", "attached:4", "bf16-wire:4,16"]
    picture = tmp_path / "links.png"
    options = ["--methods", *methods, "--steps", "2", "--json", str(output)]
    options += ["--picture", str(picture)]
    subprocess.run([*script, *options], check=True, timeout=500)
    (setting,) = json.loads(output.read_text())["settings"]
    none, alone, plain, attached, bf16, recommended = setting["methods"].values()
    size = plain["gradient_bytes"]
    assert none["tx_bytes_per_step"] < 10_000
    assert alone["tx_bytes_per_step"] < 10_000
    assert size < plain["tx_bytes_per_step"] < 1.1 * size  # headers, acknowledgments
    assert attached["tx_bytes_per_step"] < size / 20
    # A payload is half as long in bfloat16, and four times as long at four times the rank. The
    # headers and the parameters that are not compressed are a part of it at any rank.
    assert bf16["tx_bytes_per_step"] < 0.6 * attached["tx_bytes_per_step"]
    assert 3 * bf16["tx_bytes_per_step"] < recommended["tx_bytes_per_step"] < size / 20
    assert plain["above_none_ms"] > 0
    # advise measures compressed steps. Exact ones would take as long as plain's.
    for compressed in (attached, bf16, recommended):
        assert 0 < compressed["advised_ms"] < plain["advised_ms"]
    assert picture.stat().st_size > 0


@needs_hosts
@needs_taps
def test_learns_with_every_seed_and_measures_with_a_delay(tmp_path: Path) -> None:
    output = tmp_path / "record.json"
    script = [sys.executable, str(BENCHMARKS / "bench_cluster.py"), "--quick"]
    compressed = "bf16-wire:4"
    learning = ["--learning-steps", "20", "--seeds", "2", "--loss", "10"]
    learning += ["--learning-methods", compressed]
    options = ["--methods", "plain", compressed, "--delays", "1", "--steps", "2"]
    subprocess.run([*script, *options, *learning, "--json", str(output)], check=True, timeout=500)
    (setting,) = json.loads(output.read_text())["settings"]
    assert setting["delay_ms"] == 1
    assert setting["learning_steps"] == 20
    plain, ours = setting["methods"].values()
    assert "final_loss" not in plain
    assert ours["marks"][0]["steps_to_loss"] == [10, 10]
    size = plain["gradient_bytes"]
    assert size < plain["tx_bytes_per_step"] < 1.1 * size
    assert ours["tx_bytes_per_step"] < size / 20


@needs_hosts
def test_many_starts_end_alike(tmp_path: Path) -> None:
    output = tmp_path / "record.json"
    script = [sys.executable, str(BENCHMARKS / "bench_starts.py"), "--json", str(output)]
    options = ["--starts", "2", "--steps", "4", "--ranks", "2"]
    methods = ["--methods", "attached", "bf16-wire"]
    subprocess.run([*script, *options, *methods], check=True, timeout=300, cwd=tmp_path)
    results = json.loads(output.read_text())["results"]
    assert [result["method"] for result in results] == ["ours, attached", "ours, bf16 wire"]
    for result in results:
        assert result["endings"] == {"finished": 2}
        assert result["results"] == 1  # the same parameters in both starts
