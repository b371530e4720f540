# SPDX-License-Identifier: BSD-3-Clause
"""bench_reliability.py: how trials are judged, the table, and a short form of each part."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from reliability import cases, faults, restarts
from reliability.cases import CASES, FAULT_STEP, Case
from reliability.faults import GRACE, TIMEOUT, End, Trial

from support.deadline import DEADLOCK, OPERATION
from support.repository import ROOT
from support.shaped_links import needs_hosts

PROGRAM = [sys.executable, str(ROOT / "benchmarks" / "bench_reliability.py")]
CLOSED = "RuntimeError: pair.cc:553] Connection closed by peer [10.77.0.2]:7598."
LATE = TIMEOUT + GRACE + 1
KILL = Case("a rank killed", "kill", 3, victim=1, steps=2)


def _end(error: str = "", seconds: float = 1, digests: Sequence[str] = ("a", "b")) -> End:
    return End(int(bool(error)), list(digests), error, seconds)


def _ended(case: Case, *ends: End) -> Trial:
    """A trial of ours whose fault was at time 0."""
    trial = Trial(case, "ours", reference=["a", "b"])
    trial.ends = list(ends)
    return trial


@pytest.mark.parametrize(
    ("outcome", "ends"),
    [
        ("right", [_end(), _end()]),
        ("error", [_end(CLOSED), _end("ValueError: rank 1 has not called attach")]),
        ("error", [_end(CLOSED), _end("DistStoreError: wait timeout after 20000ms")]),
        ("error", [_end(CLOSED, digests=["a"]), _end(CLOSED)]),
        ("other", [_end(CLOSED), _end("RuntimeError: bad allocation")]),
        ("other", [_end(CLOSED), _end(CLOSED, LATE)]),
        ("other", [_end(CLOSED), End(-6, ["a"], CLOSED)]),
        ("other", [_end(), _end(CLOSED)]),
        ("hung", [_end(CLOSED), End()]),
        ("wrong", [_end(CLOSED), _end(CLOSED, digests=["a", "c"])]),
        ("wrong", [_end(), _end(digests=["a"])]),
    ],
)
def test_the_worst_end_of_a_living_rank_is_the_outcome(outcome: str, ends: Sequence[End]) -> None:
    trial = _ended(KILL, ends[0], End(-9, ["another"]), ends[1])
    assert trial.outcome == outcome
    problems = faults.problems({"trials": [trial.record()]})
    assert bool(problems) == (outcome not in ("right", "error"))


def test_a_stopped_rank_has_its_time_from_where_it_goes_on() -> None:
    stopped = Case("a rank is stopped", "stop", seconds=40)
    trial = _ended(stopped, _end(CLOSED, 20), _end(CLOSED, 42))
    assert trial.outcome == "error"
    assert trial.record()["seconds_to_error"] == [2, 20]
    assert trial.record()["causes"] == ["Connection closed"]


def test_the_table_has_a_row_for_a_fault() -> None:
    ours = _ended(KILL, _end(CLOSED, 1), _end(), _end(CLOSED, 3)).record()
    plain = _ended(KILL, _end(), _end(), _end()).record() | {"method": "plain"}
    assert faults.outcomes({"trials": [ours]})[1] == [["a rank killed", "error", "1.0 to 3.0"]]
    both = faults.outcomes({"trials": [plain, ours]})
    assert both[1] == [["a rank killed", "right / error", "1.0 to 3.0"]]


def test_every_stage_of_a_kill_is_tried() -> None:
    assert {case.stage for case in CASES if case.kind == "kill"} == set(cases.STAGES)
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)


def _run(case: Case, reference: Sequence[str] = (), timeout: float = OPERATION) -> Trial:
    """Runs a case of ours, with a generous timeout unless its error takes that long."""
    return Trial(case, "ours", reference, timeout).run()


@needs_hosts
def test_a_killed_rank_is_an_error_on_the_other() -> None:
    stage = "in backward, between buckets"
    trial = _run(Case("a rank killed", "kill", 2, stage=stage, steps=FAULT_STEP + 4))
    survivor, victim = trial.ends
    assert trial.outcome == "error", trial.ends
    assert victim.exitcode == -9
    assert len(survivor.digests) == FAULT_STEP


@pytest.mark.long
@needs_hosts
def test_a_rank_that_is_back_in_time_changes_nothing() -> None:
    quiet = _run(CASES[0].undisturbed()).ends[0].digests
    for case in CASES:
        if case.name.endswith(("cut off for 2 s", "stopped for 2 s")):
            assert _run(case, quiet).outcome == "right"
            assert _run(case, [*quiet[:2], "another", *quiet[3:]]).outcome == "wrong"


@pytest.mark.long
@needs_hosts
def test_a_kill_while_q_is_on_its_way_is_an_error() -> None:
    (case,) = (case for case in CASES if case.stage == "while q is on its way")
    trial = _run(case, _run(case.undisturbed()).ends[0].digests, TIMEOUT)
    assert trial.outcome == "error", trial.ends  # also: the parameters were right in every step
    next_rank, last_rank = trial.ends[case.victim + 1], trial.ends[case.victim - 1]
    assert len(next_rank.digests) == FAULT_STEP
    # The gather is a ring: this rank waits for the victim's own factor only, which may be sent.
    assert len(last_rank.digests) in (FAULT_STEP, FAULT_STEP + 1)


@pytest.mark.long
def test_a_job_that_is_killed_ends_with_the_bits_of_a_quiet_one(tmp_path: Path) -> None:
    file = tmp_path / "restarts.json"
    # The program fails if a bit differs.
    options = ["--kills", "4", "--steps", "120", "--json", str(file)]
    subprocess.run([*PROGRAM, "restarts", *options], check=True, timeout=3 * DEADLOCK)
    record = json.loads(file.read_text())
    assert sum(counts["kills"] for counts in record["kills"].values()) == 4
    assert restarts.problems(record) == []
    record["killed"][1]["losses"] = "another"
    assert restarts.problems(record) != []


def test_a_plan_has_each_moment_on_each_rank() -> None:
    kills = restarts.plan(200, 0)
    assert kills == restarts.plan(200, 0)
    assert kills != restarts.plan(200, 1)
    of_ranks = {(kill.moment, kill.rank) for kill in kills}
    assert of_ranks == {(moment, rank) for moment in restarts.MOMENTS for rank in (0, 1)}
