# SPDX-License-Identifier: BSD-3-Clause
"""torchrun -m torch_powersgd advise: measures the group and says whether compression pays."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys

import pytest
import ranks
import torch
import torch.distributed as dist
from torchrun import torchrun

import torch_powersgd as tp
from torch_powersgd.advise import (
    Link,
    Prediction,
    buckets_of,
    measure,
    measure_link,
    predict,
    predict_plain,
    verdict,
)
from torch_powersgd.rehearsal import Rehearsal

SHAPES = [[300, 200], [300], [200, 300], [7]]
CPU = torch.device("cpu")


def test_buckets_are_ddps():
    # In the order of backward; the first bucket ends where 1 MB is reached, as DDP's does.
    layout = buckets_of([[4], [1 << 18], [1 << 18], [8], [1 << 18]])
    assert layout == [[[1 << 18]], [[8], [1 << 18], [1 << 18], [4]]]


def _setting(layout, link):
    return dataclasses.replace(measure(layout, CPU, backward=0.01), link=link)


def _plain(rank):
    plain = predict_plain(_setting([[[1000]], [[500, 2]]], Link(latency=0.5, per_byte=1e-3)))
    return plain.sent_bytes, plain.wire_seconds, plain.seconds


def test_the_plain_step_is_latency_and_bytes():
    first, second = ranks.run(2, _plain)
    assert first == second, "alike on all ranks"
    sent, wire, added = first
    assert sent == 8000
    assert wire == pytest.approx(2 * 0.5 + 8.0)
    assert added > 0


def _rehearsed(rank):
    calls = []

    def start(bucket, buffer):
        calls.append((bucket, buffer.numel()))
        return dist.all_reduce(buffer, async_op=True)

    rehearsal = Rehearsal([5, 300], CPU)
    alone = rehearsal.alone(start)
    calls_alone = len(calls)
    added = rehearsal.added(start, alone)
    return calls[:calls_alone], calls[calls_alone:], alone, added


def test_a_rehearsal_averages_bucket_after_bucket():
    results = ranks.run(2, _rehearsed, backend="gloo")
    for alone, added, seconds_alone, seconds_added in results:
        step = [(0, 5), (1, 300)]
        assert alone == 4 * step
        assert added == len(added) // 2 * step
        assert 1 <= len(added) // 2 <= 10
        assert min(seconds_alone, seconds_added) > 0
    assert results[0] == results[1], "alike on all ranks"


def _predictions(rank):
    options = [tp.Options(matrix_approximation_rank=r, start_powerSGD_iter=0) for r in (1, 4, 100)]
    setting = _setting(buckets_of(SHAPES), Link(latency=0.25, per_byte=1e-6))
    compressed = [predict(setting, each) for each in options]
    return [(p.name, p.sent_bytes, p.wire_seconds, p.stage_seconds, p.seconds) for p in compressed]


def test_the_parts_of_a_compressed_step():
    results = ranks.run(2, _predictions)
    for (name_1, one, wire_1, stages_1, all_1), (_, four, wire_4, _, _), raw in results:
        assert name_1 == "rank 1"
        raw_and_counts = 307 + 2 + 1
        assert one == 4 * (2 * 500 + raw_and_counts)
        assert four == 4 * (4 * 2 * 500 + raw_and_counts)
        assert wire_1 == pytest.approx(2 * 0.25 + 1e-6 * one)
        assert wire_4 == pytest.approx(2 * 0.25 + 1e-6 * four)
        assert min(stages_1, all_1) > 0
        # At rank 100 nothing pays: the bucket goes whole.
        assert raw[:4] == ("rank 100", 4 * 120_307, pytest.approx(0.25 + 4e-6 * 120_307), 0)
    assert results[0] == results[1], "alike on all ranks"


def _link(rank):
    link = measure_link(CPU)
    return link.latency, link.per_byte


def test_the_link_is_measured_alike_on_all_ranks():
    first, second = ranks.run(2, _link, backend="gloo")
    assert first == second
    assert min(first) > 0


def test_the_verdict():
    plain = Prediction("plain", 100, 1.0, 0.0, 1.0)
    slow = [Prediction("rank 1", 10, 0.5, 0.45, 0.95), Prediction("rank 4", 40, 0.6, 1.0, 1.6)]
    assert "will not pay" in verdict(plain, slow)
    fast = [
        Prediction("rank 1", 1, 0.01, 0.05, 0.06),
        Prediction("rank 4", 4, 0.04, 0.06, 0.1),  # little slower than the fastest: better
        Prediction("rank 8", 8, 0.4, 0.3, 0.7),
    ]
    assert "matrix_approximation_rank=4)" in verdict(plain, fast)
    assert "10.0 times less" in verdict(plain, fast)


COMMAND = ["torch_powersgd", "advise", "models_of_advise:model"]
MODULE = """
import torch

def model():
    return torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Linear(200, 300))
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "models_of_advise.py").write_text(MODULE)
    return tmp_path


def _alone(folder, *arguments):
    return subprocess.run(
        [sys.executable, "-m", *COMMAND, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=150,
    )


def test_under_torchrun(folder):
    pytest.importorskip("rich", reason="the table is printed by rich")
    ended = torchrun("-m", *COMMAND, "--ranks", 1, 4, cwd=folder, COLUMNS="120")
    assert "over 2 ranks" in ended.stdout
    rows = dict(re.findall(r"│ (plain|rank \d+) +│ +([\d.]+) │", ended.stdout))
    assert rows["plain"] == f"{4 * (2 * 60_000 + 500) / 1e6:.3f}"
    assert rows["rank 4"] == f"{4 * (4 * 2 * 500 + 500 + 3) / 1e6:.3f}"
    assert len(re.findall("Compression (pays|will not pay)", ended.stdout)) == 1, "on one rank"


@pytest.mark.parametrize("milliseconds", ["-1", "nan", "inf", "soon"])
def test_a_backward_pass_that_cannot_be(folder, milliseconds):
    ended = _alone(folder, "--backward-ms", milliseconds)
    assert ended.returncode == 2
    assert "--backward-ms" in ended.stderr
    assert milliseconds in ended.stderr


def test_without_torchrun_it_says_how(folder):
    ended = _alone(folder)
    assert ended.returncode == 2
    assert "torchrun" in ended.stderr
