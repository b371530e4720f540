# SPDX-License-Identifier: BSD-3-Clause
"""bench_cluster.py: its arguments, its figures, and its runs on shaped links."""

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
import provenance
import shapes
from cluster import figures, hosts, launch, models, report

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
def test_the_recommended_setting_is_compared_by_default(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--device", device])
    arguments = bench_cluster.parse_arguments()
    names = [contender.name for contender in arguments.contenders]
    recommended = tp.Options.recommended()
    name = f"{recommended.wire_dtype}-wire:{recommended.matrix_approximation_rank}"
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
    record = {**dict.fromkeys(provenance.PROVENANCE, "-"), "settings": [], "left_out": {"X": "why"}}
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


def test_figures() -> None:
    def run(*milliseconds: float, sent: float = 0, losses: list[float] | None = None) -> launch.Run:
        return launch.Run([], list(milliseconds), losses or [], sent, gradient_bytes=100)

    # The whole second round is slower. The difference by round does not see that.
    rounds = [
        {
            "none": run(10, 12, 11),
            "ddp-alone": run(9, 9, 9),
            "plain": run(31, 30, 32, sent=200),
            "hook": launch.Run(["hung"]),
        },
        {
            "none": run(20, 22, 21),
            "ddp-alone": run(19, 19, 19, sent=1),
            "plain": run(41, 40, 42, sent=200),
        },
    ]
    learned = {"plain": [run(1, losses=[float(100 - step) for step in range(100)])]}
    compared = figures.compare(rounds, learned, figures.marks(learned, 70.0))
    assert compared["plain"]["above_none_ms"] == 20
    assert compared["plain"]["above_ddp_alone_ms"] == 22
    assert compared["ddp-alone"]["above_none_ms"] == -2
    assert compared["ddp-alone"]["times_fewer_bytes"] is None
    assert compared["plain"]["step_ms"] == 36
    # The mean of the steps i-9 to i, counted from 0, is 100 - i + 4.5: at i = 35 it is 69.5.
    assert compared["plain"]["steps_to_loss"] == 36
    assert compared["plain"]["final_loss"] == 5.5
    assert compared["hook"] == {"failures": ["hung"]}

    setting = {"model": "demo", "ranks": 2, "learning_failures": {"hook": ["hung"]}}
    # An older record has a list of losses, and not one for each seed.
    losses = {"plain": learned["plain"][0].losses, "hook": []}
    record = {"settings": [{**setting, "losses": losses}]}
    assert figures.learned(record, "demo", 4) == {}
    again = figures.learned(record, "demo", 2)
    assert figures.compare(rounds, again, figures.marks(learned, 70.0)) == compared


def test_figures_over_seeds() -> None:
    """The times are medians, and a run that never reaches the loss is longer than any other."""
    falling = [[start - step for step in range(100)] for start in (100.0, 110.0, 1000.0)]
    setting = {
        "model": "demo",
        "ranks": 2,
        "losses": {"plain": falling},
        "learning_failures": {"plain": [["hung"], [], []]},
    }
    learned = figures.learned({"settings": [setting]}, "demo", 2)
    assert [run.failures for run in learned["plain"]] == [["hung"], [], []]
    rounds = [{"plain": launch.Run([], [500.0, 500.0])}]
    plain = figures.compare(rounds, learned, figures.marks(learned, 70.0))["plain"]
    assert plain["steps_to_loss_by_seed"] == [36, 46, None]
    assert plain["steps_to_loss"] == 46
    assert plain["seconds_to_loss_by_seed"] == [18, 23, None]
    assert plain["seconds_to_loss"] == 23
    assert plain["final_loss"] == 110 - 99 + 4.5
    none_in_time = figures.compare(rounds, learned, figures.marks(learned, 0.0))["plain"]
    assert none_in_time["steps_to_loss"] is None
    assert none_in_time["seconds_to_loss"] is None


def test_each_seed_is_timed_to_its_own_plain_run() -> None:
    """The losses of ours fall half as fast, and its steps take a fifth of the time."""
    starts = (100.0, 300.0, 500.0)
    learned = {
        "plain": [launch.Run(losses=[start - step for step in range(100)]) for start in starts],
        "ours": [launch.Run(losses=[start - step / 2 for step in range(150)]) for start in starts],
        "slow": [launch.Run(losses=[start] * 150) for start in starts],
    }
    marks = figures.marks(learned, None)
    # The mean of the last ten losses is 4.5 above the last of them.
    assert [each[1] for each in marks.losses] == [300 - last + 4.5 for last in (24, 49, 74, 99)]
    assert marks.record()["loss"] == 300 - 99 + 4.5
    assert marks.record()["learning_steps"] == 100
    rounds = [
        {
            "plain": launch.Run([], [500.0, 500.0]),
            "ours": launch.Run([], [100.0, 100.0]),
            "slow": launch.Run([], [100.0, 100.0]),
        }
    ]
    compared = figures.compare(rounds, learned, marks)
    assert [mark["steps_to_loss"] for mark in compared["plain"]["marks"]] == [25, 50, 75, 100]
    # Counted from 0, plain is at start - i + 4.5 in step i, and ours at start - i / 2 + 2.25. So
    # ours reaches the loss of plain's step i in its step 2 i - 4.
    early, _, late, last = compared["ours"]["marks"]
    assert (early["steps_to_loss"], late["steps_to_loss"]) == (2 * 24 - 4 + 1, 2 * 74 - 4 + 1)
    assert early["times_sooner_by_seed"] == [25 * 5 / early["steps_to_loss"]] * 3
    assert late["times_sooner"] == late["times_sooner_by_seed"][0] == 75 * 5 / late["steps_to_loss"]
    assert last["steps_to_loss"] is None  # it has trained for 150 steps
    assert last["times_sooner"] == 0
    assert compared["slow"]["seconds_to_loss"] is None
    assert not figures.catches_up(learned["slow"][0], learned["plain"][0], 100)
    assert figures.catches_up(learned["plain"][0], learned["plain"][0], 100)


def test_the_report_shows_delays_and_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    learned = {"plain": [launch.Run(losses=[float(s - i) for i in range(60)]) for s in (90, 95)]}
    rounds = [{"plain": launch.Run([], [500.0, 500.0])}]
    marks = figures.marks(learned, 60.0)
    compared = figures.compare(rounds, learned, marks)
    setting = {"model": "demo", "ranks": 2, "rate": "1gbit", **marks.record()}
    record = {
        **provenance.provenance("a processor"),
        "on": "cpu",
        "cores": 2,
        "titles": {"plain": "plain all-reduce"},
        "left_out": {},
        "settings": [
            {**setting, "methods": compared},
            {**setting, "methods": compared, "delay_ms": 0.1},
        ],
    }
    report.show(record)
    without, _, delayed = capsys.readouterr().out.partition("demo, 2 ranks, 1gbit, 0.1 ms")
    assert "demo, 2 ranks, 1gbit;" in without
    assert "18.0..20.5" in delayed  # 36 and 41 steps of half a second


@needs_hosts
def test_measures_what_is_sent(tmp_path: Path) -> None:
    """With two ranks, a ring all-reduce sends every gradient once."""
    output = tmp_path / "record.json"
    script = [sys.executable, str(BENCHMARKS / "bench_cluster.py"), "--quick"]
    methods = ["none", "ddp-alone", "plain", "attached:4", "bf16-wire:4,16"]
    pictures = {"--picture": tmp_path / "links.png", "--picture-of-all": tmp_path / "all.png"}
    files = [str(word) for item in pictures.items() for word in item]
    options = ["--methods", *methods, "--steps", "2", "--json", str(output), *files]
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
    for picture in pictures.values():
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
    ((name, (first, second)),) = setting["losses"].items()
    assert name == compressed
    assert len(first) == len(second) == 20
    assert first[0] != second[0]  # other weights, other batches
    plain, ours = setting["methods"].values()
    assert ours["steps_to_loss_by_seed"] == [10, 10]
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
