# SPDX-License-Identifier: BSD-3-Clause
"""The launcher of ranks: what the ranks return, how they fail, and what is left."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from launcher import ranks

from support.deadline import DEADLOCK

WORLD = 2


def _describe(rank: ranks.Rank, greeting: str) -> list[object]:
    with rank.group("gloo", DEADLOCK):
        dist.barrier()  # or one would be gone before the other has connected
        return [greeting, rank.number, os.environ["VARIABLE"], os.getsid(0) == os.getpid()]


def test_every_rank_has_a_group_variables_and_a_session_of_its_own() -> None:
    variables = {"VARIABLE": "value"}
    found = ranks.call(
        _describe, WORLD, "hello", what="a call", seconds=DEADLOCK, variables=variables
    )
    assert found == [["hello", number, "value", True] for number in range(WORLD)]


def _fail(rank: ranks.Rank, folder: str) -> None:
    Path(folder, str(rank.number)).write_text(f"{os.getpid()} {rank.folder}")
    if rank.number == 1:
        raise ValueError("the cause")
    time.sleep(2 * DEADLOCK)


def test_the_first_failure_ends_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_GRACE_SECONDS", 0)
    with pytest.raises(RuntimeError, match=r"a call: ValueError: the cause\n(.*\n)*Traceback"):
        ranks.call(_fail, WORLD, str(tmp_path), what="a call", seconds=DEADLOCK)
    for file in tmp_path.iterdir():
        process, folder = file.read_text().split()
        assert not Path("/proc", process).exists()
        assert not Path(folder).exists()


def _sleep(rank: ranks.Rank) -> None:
    time.sleep(2 * DEADLOCK)


def test_ranks_that_do_not_end_in_time_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TimeoutError, match="a call did not end within 0.1 s"):
        ranks.call(_sleep, WORLD, what="a call", seconds=0.1)
    monkeypatch.setattr(ranks, "LEAST_MEMORY", 1 << 60)
    with pytest.raises(MemoryError, match="a call leaves less than"):
        ranks.call(_sleep, WORLD, what="a call", seconds=DEADLOCK)
