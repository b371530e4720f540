# SPDX-License-Identifier: BSD-3-Clause
"""bench_endurance.py and bench_restarts.py, with fewer steps, groups and kills."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.repository import ROOT

pytest.importorskip("rich")

import local_ranks
from endurance import kills, resources, tables, turns

GROUPS = 30
TURN = 200  # steps; every call between steps comes within so many
SEED = 2  # of three kills, one at each moment
# Torch's flight recorder fills in the first steps, and callbacks get their threads. A tensor of
# each step would be 47 kB.
FEW_STEPS_GROWTH = 1000


def _run(program: str, *words: object) -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / program), *map(str, words)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


def test_many_groups_leave_no_threads_and_no_files() -> None:
    runs = local_ranks.call(
        turns.groups, turns.WORLD, GROUPS, True, what=f"{GROUPS} groups", seconds=300
    )
    for run in runs:
        samples = run["samples"]
        assert len(samples) == GROUPS
        for field in (2, 4):  # threads and files
            early, late = samples[: GROUPS // 3], samples[GROUPS // 3 :]
            most = max(sample[field] for sample in early)
            assert max(sample[field] for sample in late) <= most, samples


@pytest.mark.long
def test_a_long_training_with_every_option_in_turns() -> None:
    steps = TURN * len(turns.TURNS)
    runs = local_ranks.call(
        turns.train, turns.WORLD, steps, True, TURN, what=f"{steps} steps", seconds=800
    )
    record = {"runs": {"ours steps": runs}, "steps_warm_up": steps // 2, "steps": steps}
    assert [turn["title"] for turn in runs[0]["turns"]] == list(turns.TURNS)
    faults = tables.faults(record, growth={"steps": FEW_STEPS_GROWTH})
    assert not faults


@pytest.mark.long
def test_a_job_that_is_killed_ends_with_the_bits_of_a_quiet_one(tmp_path: Path) -> None:
    file = tmp_path / "restarts.json"
    # The program fails if a bit differs.
    _run("bench_restarts.py", "--kills", 3, "--steps", 120, "--seed", SEED, "--json", file)
    record = json.loads(file.read_text())
    assert [kill["moment"] for kill in record["kills"]] == [
        order.moment for order in kills.plan(3, SEED)
    ]
    assert {kill["moment"] for kill in record["kills"]} == set(kills.MOMENTS)
    for kill in record["kills"]:
        assert kill["found"] == "saving" or kill["moment"] != "writing"
    assert record["killed"][0]["began"] > 0
    assert record["killed_other_failures"] == 0
    assert "equal to the bit" in _run("bench_restarts.py", "--show", file)
    record["killed"][1]["losses"] = "another"
    file.write_text(json.dumps(record))
    with pytest.raises(AssertionError, match="losses of rank 1"):
        _run("bench_restarts.py", "--show", file)


def test_a_plan_has_each_moment_on_each_rank() -> None:
    orders = kills.plan(50, 0)
    assert len(orders) == 50
    assert orders == kills.plan(50, 0)
    assert orders != kills.plan(50, 1)
    for moment in kills.MOMENTS:
        assert {order.rank for order in orders if order.moment == moment} == {0, 1}


def _flat(memory: list[int], threads: int = 3, files: int = 9) -> dict[str, Any]:
    samples = [[step, held, threads, 0, files] for step, held in enumerate(memory)]
    turn = {"title": "float32 factors", "error": 1e-7}
    return {"samples": samples, "hashes": ["a"], "turns": [turn], "error": 1e-7}


def test_growth_and_differences_are_faults() -> None:
    good: dict[str, Any] = {
        "runs": {"ours steps": [_flat([10**6] * 8), _flat([10**6] * 8)]},
        "steps_warm_up": 2,
        "steps": 8,
    }
    assert tables.faults(good) == []
    assert resources.slope(_flat([5, 8, 11, 14])["samples"]) == pytest.approx(3)

    def spoiled(rank: int, **fields: Any) -> list[str]:
        bad = copy.deepcopy(good)
        bad["runs"]["ours steps"][rank] |= fields
        return tables.faults(bad)

    assert spoiled(1, hashes=["b"]) == ["the ranks' parameters differ"]
    growing = _flat([10**6 + 200 * step for step in range(8)])["samples"]
    assert "rank 1: memory grows by 200 bytes each" in spoiled(1, samples=growing)[0]
    leaking = [[step, 10**6, 3, 0, 9 + step] for step in range(8)]
    assert "rank 0: 16 files after 13" in spoiled(0, samples=leaking)[0]
    lost = [{"title": "float32 factors", "error": 1e-4}]
    assert "the sums differ by 1.0e-04" in spoiled(0, turns=lost)[0]
    nothing = [{"title": "float32 factors", "error": float("nan")}]
    assert "the sums differ by nan" in spoiled(0, turns=nothing)[0]
