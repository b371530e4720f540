# SPDX-License-Identifier: BSD-3-Clause
"""bench_scaling.py: what it counts, its model of larger groups, and its tables."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import bench_scaling
import pytest
import torch
from scaling import devices, model, tables

from support.deadline import DEADLOCK
from support.repository import ROOT
from torch_powersgd._core import _C
from torch_powersgd.cli.footprint import Layout, elements_of
from torch_powersgd.options import to_core

WORLD = 2


@pytest.mark.long
def test_a_run_counts_what_is_predicted(tmp_path: Path) -> None:
    file = tmp_path / "scaling.json"
    script = [sys.executable, str(ROOT / "benchmarks" / "bench_scaling.py"), "--ranks", f"{WORLD}"]
    subprocess.run([*script, "--json", str(file)], check=True, timeout=2 * DEADLOCK)
    record: dict[str, Any] = json.loads(file.read_text())
    by_method = {run["method"]: run for run in record["runs"]}
    assert list(by_method) == list(model.METHODS)
    # torch's hook sends none of this project's counts, one element for each matrix and one.
    for method, run in by_method.items():
        sent = run["predicted"]["sent_bytes"]
        assert run["sent_bytes"] == pytest.approx(sent, rel=2e-3), method
    plain, ours = by_method["plain"], by_method["int8"]
    # Each context has a connection to every other rank, and a socket that listens.
    assert plain["sockets"] == WORLD - 1 + 1
    assert ours["sockets"] == 2 * (WORLD - 1 + 1)
    beyond = ours["memory_bytes"] - plain["memory_bytes"]
    assert beyond == pytest.approx(ours["predicted"]["memory_bytes"], rel=0.1)
    for table in (tables.sent_by_ranks, tables.costs, tables.larger_groups, tables.several_devices):
        headings, rows = table(record)
        assert all(len(row) == len(headings) for row in rows)


def test_one_rank_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_scaling.parse_arguments(["--ranks", "1"])
    assert "--ranks: integers of at least 2, got 1" in capsys.readouterr().err


def _seconds(layout: Layout, method: str, link: model.Link, world: int) -> float:
    return link.seconds(model.reductions_of(layout, method, world), world)


@pytest.mark.parametrize("world", [2, 16, 1024])
def test_the_modeled_plain_step_is_a_ring(world: int) -> None:
    layout = [[[1000, 64]], [[2000, 64], [100]]]
    link = model.Link(message=10e-6, handling=1, per_byte=1e-9)
    size = 4 * (3000 * 64 + 100)
    sent = model.sent_bytes(layout, "plain", world)
    sent -= 2 * (world - 1) * model.GLOO_BYTES["all-reduce"]
    assert sent == pytest.approx(2 * (world - 1) / world * size, abs=2)
    messages = 2 * 2 * (world - 1)
    seconds = _seconds(layout, "plain", link, world)
    assert seconds == pytest.approx(messages * 10e-6 + sent * 1e-9)  # without Gloo's own bytes


def test_the_modeled_hook_has_three_all_reduces() -> None:
    layout = model.layout_of("demo", model.ONE_BUCKET)
    link = model.Link(message=1e-3, handling=1, per_byte=0)
    assert _seconds(layout, "hook", link, 4) == pytest.approx(3 * 2 * 3 * 1e-3)


@pytest.mark.parametrize("buckets", [1, 6])
def test_a_modeled_step_waits_for_its_longest_bucket(buckets: int) -> None:
    """On four ranks P takes one round of messages in the first buckets, and two in the last."""
    layout = [[[64, 64, 4]]] * (buckets - 1) + [[[64, 64, 4], [100_000]]]
    link = model.Link(message=1, handling=1e-6, per_byte=0)
    rounds = 2 * (buckets - 1) + 3
    assert _seconds(layout, "int8", link, 4) == pytest.approx(3 + rounds * 3 * 1e-6)


@pytest.mark.parametrize("hosts", devices.HOSTS)
def test_a_modeled_host_of_several_devices_sends_what_leaves_it(hosts: int) -> None:
    layout = model.layout_of(devices.MODEL, devices.BUCKET_MB)
    core = to_core(model.options_of("int8"))
    payloads = sum(_C.content_bytes(bucket, core, torch.float32) for bucket in layout)

    def sent(method: str) -> float:
        costs = [c for bucket in layout for c in devices.METHODS[method](bucket, hosts)]
        return sum(cost.sent for cost in costs) / payloads

    world = hosts * devices.DEVICES
    host_of = [rank // devices.DEVICES for rank in range(world)]
    leaves = [(a, b) for a in range(world) for b in range(world) if host_of[a] == 0 < host_of[b]]
    # Of W parts, a device sends one to each other, and a ring passes all but one to the next host.
    assert sent("ours, int8, in one level") == pytest.approx(
        (len(leaves) + world - 1) / world, 0.02
    )
    assert sent("ours, int8") == pytest.approx(2 * (hosts - 1) / hosts, rel=0.02)
    whole = devices.ring(1000, hosts)
    assert whole.messages + whole.steps == 2 * (world - 1)


def test_a_cap_holds_for_the_first_bucket_as_in_ddp() -> None:
    # DDP's default has a small first bucket. One that is named has none.
    default, named = (model.layout_of("demo", cap) for cap in (None, 25))
    first, others = elements_of(default[0]), sum(map(elements_of, default[1:]))
    assert 4 * first < 25 << 20 < 4 * elements_of(named[0])
    assert sum(map(elements_of, named)) == first + others
    assert len(model.layout_of("demo", model.ONE_BUCKET)) == 1
