# SPDX-License-Identifier: BSD-3-Clause
"""bench_cluster.py: its arguments, and its runs on shaped links."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from support.deadline import DEADLOCK
from support.repository import ROOT

pytest.importorskip("matplotlib")

import bench_cluster
import report
import shapes
from cluster import methods, models, player
from cluster.rank import Job
from launcher import hosts, mps

import torch_powersgd as tp
from support.shaped_links import needs_hosts, needs_taps


@pytest.mark.parametrize(
    ("rate", "value"), [("100mbit", 1e8), ("2.5gbit", 2.5e9), ("500kbit", 5e5)]
)
def test_a_rate_is_read_as_tc_does(rate: str, value: float) -> None:
    assert hosts.bits_per_second(rate) == value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--rates", "fast"],
            "expected a number and kbit, mbit or gbit, such as 1gbit, got 'fast'",
        ),
        (["--rates", "0mbit"], "got '0mbit'"),
        (["--delays", "soon"], "--delays: expected milliseconds of at least 0, got 'soon'"),
        (["--ranks", "1"], "--ranks: expected an integer of at least 2, got '1'"),
        (
            ["--ranks", "8", "6", "--per-host", "4"],
            "--ranks: expected multiples of --per-host 4, got 6",
        ),
        (["--steps", "many"], "--steps: expected an integer of at least 2, got 'many'"),
        (["--methods", "carrier-pigeon"], "invalid choice: 'carrier-pigeon'"),
        (["--methods", "plain:4"], "plain has no matrix rank, got 'plain:4'"),
        (["--methods", "bf16-wire:8,0"], "integers of at least 1, got 'bf16-wire:8,0'"),
        (["--methods", "bf16-wire+levels=2:4"], "levels can only be 1, got 2"),
        (["--methods", "bf16-wire"], "integers of at least 1, got 'bf16-wire'"),
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
    words = ["plain", "hook-1-bucket:4", "bf16-wire:8,16", "bf16-wire:16"]
    monkeypatch.setattr(sys, "argv", ["bench", "--methods", *words])
    found = {each.name: each.title for each in bench_cluster.parse_arguments().contenders}
    assert list(found) == ["plain", "hook-1-bucket:4", "bf16-wire:8", "bf16-wire:16"]
    assert found["bf16-wire:16"] == "ours, bf16 wire, rank 16"
    assert found["plain"] == "plain all-reduce"


def test_variables_of_nccl_are_of_the_environment() -> None:
    words = "attached+NCCL_ALGO=allreduce:tree+NCCL_PROTO=LL+min_numel=9:4,8"
    four, eight = methods.named(words)
    assert four.how.variables == {"NCCL_ALGO": "allreduce:tree", "NCCL_PROTO": "LL"}
    assert [four.rank, eight.rank] == [4, 8]
    assert four.how.options is not None
    assert four.how.options(4, 0).min_numel == 9


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_default_options_are_compared(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--device", device])
    arguments = bench_cluster.parse_arguments()
    names = [contender.name for contender in arguments.contenders]
    defaults = tp.Options()
    name = f"{defaults.wire_dtype}-wire:{defaults.matrix_approximation_rank}"
    assert name in names
    assert bench_cluster.PICTURED.split()[-1] == name


def test_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "argv", ["bench_cluster.py", "--device", "cuda"])
    with pytest.raises(SystemExit) as ended:
        bench_cluster.main()
    for thing in ("root", "the program ip", "the program tc", "the program nvidia-cuda-mps"):
        assert thing in str(ended.value)


def test_the_logs_of_ranks_that_fail_are_kept(tmp_path: Path) -> None:
    job = Job(methods.Contender("carrier-pigeon", None), "gpt-1M", "cpu")
    with player.Player(2, job, step_limit=60, warmup=1, logs=tmp_path) as failing:
        run = failing.turn(2)
        assert failing.exhausted
    assert len(run.failures) == player.ATTEMPTS
    assert all("ValueError: invalid choice: 'carrier-pigeon'" in why for why in run.failures)
    kept = sorted(tmp_path.glob("gpt-1M-carrier-pigeon-*/log*"))
    assert [log.name for log in kept] == ["log0", "log1"] * player.ATTEMPTS


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
        ("gpt-1M", shapes.gpt(3, 160, 128, 128, bias=False)),
        ("gpt-5M", shapes.gpt(6, 256, 128, 128, bias=False)),
    ],
)
def test_models_are_of_the_published_shapes(model: str, expected: list[shapes.Shape]) -> None:
    with torch.device("meta"):
        made = models.TASKS[model].make()
    assert [tuple(parameter.shape) for parameter in made.parameters()] == expected


# A link on which synchronization takes longer than the small model's step.
QUICK = [sys.executable, str(ROOT / "benchmarks" / "bench_cluster.py")]
QUICK += ["--models", "gpt-1M", "--rates", "200mbit", "--steps", "2", "--rounds", "2"]


@needs_hosts
def test_measures_what_is_sent(tmp_path: Path) -> None:
    """With two ranks, a ring all-reduce sends every gradient once."""
    output, picture = tmp_path / "record.json", tmp_path / "links.png"
    methods = ["none", "plain", "attached:4", "bf16-wire:16"]
    options = ["--methods", *methods, "--json", str(output), "--picture", str(picture)]
    subprocess.run([*QUICK, *options], check=True, timeout=2 * DEADLOCK)
    (setting,) = json.loads(output.read_text())["settings"]
    none, plain, attached, bf16 = setting["methods"].values()
    size = plain["gradient_bytes"]
    assert none["tx_bytes_per_step"] < 10_000
    assert size < plain["tx_bytes_per_step"] < 1.1 * size  # headers, acknowledgments
    assert attached["tx_bytes_per_step"] < size / 20
    # A payload is half as long in bfloat16, and four times as long at four times the rank. The
    # headers and the parameters that are not compressed are a part of it at any rank.
    assert 1.5 < bf16["tx_bytes_per_step"] / attached["tx_bytes_per_step"] < 2.5
    assert plain["above_none_ms"] > 0
    assert picture.stat().st_size > 0


@needs_hosts
def test_the_ranks_of_a_host_share_its_link(tmp_path: Path) -> None:
    """Plain's ring passes each link once. In two levels, a host sends one payload to the other."""
    output = tmp_path / "record.json"
    one_bucket = "int8-wire+bucket_cap_mb=25"  # small payloads take one level
    names = ["plain", f"{one_bucket}+levels=1:16", f"{one_bucket}:16"]
    options = ["--ranks", "4", "--per-host", "2", "--methods", *names, "--json", str(output)]
    subprocess.run([*QUICK, *options], check=True, timeout=2 * DEADLOCK)
    (setting,) = json.loads(output.read_text())["settings"]
    plain, one_level, two_levels = setting["methods"].values()
    size = plain["gradient_bytes"]
    assert 1.5 * size < plain["tx_bytes_per_step"] < 1.5 * 1.1 * size
    assert 1 < two_levels["payloads"] < 1.2  # padding, headers, acknowledgments
    # Two-shot, each of two processes sends a quarter of a payload to two others, twice.
    assert 2 < one_level["payloads"] < 2 * 1.2


@pytest.mark.long
@needs_hosts
@needs_taps
def test_learns_with_every_seed_and_measures_with_a_delay(tmp_path: Path) -> None:
    output = tmp_path / "record.json"
    compressed = "bf16-wire:4"
    options = ["--methods", "plain", compressed, "--delays", "1", "--json", str(output)]
    options += ["--learning-steps", "40", "--seeds", "2"]
    subprocess.run([*QUICK, *options], check=True, timeout=2 * DEADLOCK)
    (setting,) = json.loads(output.read_text())["settings"]
    assert setting["delay_ms"] == 1
    assert setting["learning_steps"] == 40
    plain, ours = setting["methods"].values()
    assert len(ours["steps_to_loss"]) == 2
    assert plain["times_sooner"] == 1
    size = plain["gradient_bytes"]
    assert size < plain["tx_bytes_per_step"] < 1.1 * size
    assert ours["tx_bytes_per_step"] < size / 20


# Stands in for NVIDIA's program. With -d it leaves a daemon behind. Otherwise it reads commands,
# and obeys them unless it was told not to.
FAKE_CONTROL = """#!/bin/sh
if [ "$1" = -d ]; then
  sleep 1000 </dev/null >/dev/null 2>&1 &
  echo $! >"$CUDA_MPS_PIPE_DIRECTORY/daemon"
elif [ -z "$DEAF" ]; then
  read command && [ "$command" = quit ] && kill "$(cat "$CUDA_MPS_PIPE_DIRECTORY/daemon")"
fi
"""


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
@pytest.mark.parametrize("deaf", ["", "1"], ids=["quits", "is killed"])
def test_the_mps_daemon_ends(deaf: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control = tmp_path / mps.CONTROL
    control.write_text(FAKE_CONTROL)
    control.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("DEAF", deaf)
    folders = []

    def serve_until_interrupted() -> None:
        with mps.service() as variables:
            folders.append(Path(variables["CUDA_MPS_PIPE_DIRECTORY"]))
            daemon = int((folders[0] / "daemon").read_text())
            # A process that has just begun has no environment yet by which it can be found.
            deadline = time.monotonic() + DEADLOCK
            while mps.daemons(folders[0]) != [daemon] and time.monotonic() < deadline:
                time.sleep(0.05)
            assert mps.daemons(folders[0]) == [daemon]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        serve_until_interrupted()
    assert mps.daemons(folders[0]) == []
    assert not folders[0].exists()
