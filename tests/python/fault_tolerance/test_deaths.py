# SPDX-License-Identifier: BSD-3-Clause
"""Replicas of torchft die at every place of a step and come back. The others lose nothing.

Each replica checks in its process that a new quorum leaves its residuals to the bit, and a step
that was dropped none of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from support.deadline import DEADLOCK
from support.repository import ROOT

pytest.importorskip("torchft")

from replica import HEALING, PLACES, SHARING, Death, Kind
from replicas import Replicas
from torchft.coordination import LighthouseServer
from torchft.manager import WorldSizeMode

EVERY = 5  # steps from one death to the next
EVERYWHERE = [
    *(Death(EVERY * (i + 1), place) for i, place in enumerate(PLACES)),
    Death(0, SHARING),
    Death(0, HEALING),
]


def test_a_replica_dies_at_every_place_of_a_step_and_comes_back() -> None:
    train_through(Kind(), EVERYWHERE)


@pytest.mark.parametrize("density", [None, 1 / 16], ids=["factors", "sparse"])
def test_a_replica_of_diloco_dies_at_every_place(density: float | None) -> None:
    manager = {"use_async_quorum": False}
    shares = [death for death in EVERYWHERE if not density or death.place != SHARING]  # factors
    train_through(Kind("diloco", manager=manager, density=density), shares)


def test_a_replica_of_two_processes_with_fsdp_dies() -> None:
    with Replicas(Kind("fsdp", processes=2)) as replicas:
        replicas.start("b1", Death(EVERY, "exchange"))
        replicas.run_until_deaths(1)
        replicas.start("b1")
        replicas.end("a0", "b1")
    _check(replicas)


def test_a_spare_replica_takes_the_place_of_one_that_dies() -> None:
    fixed = {"min_replica_size": 2, "world_size_mode": WorldSizeMode.FIXED_WITH_SPARES}
    with Replicas(Kind(manager=fixed), first=("a0", "b1")) as replicas:
        replicas.join("c2")
        replicas.kill("b1")
        replicas.run_until_deaths(1)
        replicas.start("b1")
        replicas.end("a0", "b1", "c2")
    _check(replicas)


def test_two_die_at_once() -> None:
    with Replicas() as replicas:
        replicas.start("b1", Death(EVERY, "exchange"))
        replicas.start("c2", Death(EVERY, "exchange"))
        replicas.run_until_deaths(2)
        replicas.join("b1")
        replicas.start("c2")
        replicas.end("a0", "b1", "c2")
    _check(replicas)


def train_through(kind: Kind, deaths: Sequence[Death]) -> None:
    with Replicas(kind) as replicas:
        replicas.join("b1")
        for i, death in enumerate(deaths):
            replicas.start("c2", death)
            replicas.run_until_deaths(i + 1)
        replicas.start("c2")
        replicas.end("a0", "b1", "c2")
    _check(replicas)
    for summary in replicas.summaries:
        if summary["place"].name != "c2":
            assert summary["moves"] > 0, summary
            assert summary["compressed_calls"] > EVERY, summary
    assert any(summary["dropped"] for summary in replicas.summaries)


def _check(replicas: Replicas) -> None:
    differing = {step: w for step, w in replicas.weights_by_step().items() if len(w) > 1}
    assert not differing
    for summary in replicas.summaries:
        assert not summary["changed"], summary
        assert summary["residual"] > 0, summary


def test_the_example_prints_what_its_page_shows(tmp_path: Path) -> None:
    page = (ROOT / "docs/torchft.md").read_text()
    shown = page.split("ends with\n\n```text\n")[1].split("```")[0]
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=10_000)
    stores = [
        dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) for _ in range(2)
    ]
    started: list[Any] = []
    for store in stores:  # as torchrun would
        place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
        variables = {**place, "RANK": "0", "WORLD_SIZE": "1", "STEPS": "100"}
        variables["TORCHFT_LIGHTHOUSE"] = lighthouse.address()
        program = [sys.executable, str(ROOT / "examples/with_torchft.py")]
        output = (tmp_path / f"output{len(started)}").open("w+")
        environment = {**os.environ, **variables}
        ended = subprocess.Popen(program, env=environment, stdout=output)
        started.append((ended, output))
    for process, output in started:
        assert process.wait(DEADLOCK) == 0
        output.seek(0)
        first = f"this replica is process {process.pid}\nstep 1, replicas: 2\n"
        assert output.read().startswith(first + shown)
        output.close()
    lighthouse.shutdown()
