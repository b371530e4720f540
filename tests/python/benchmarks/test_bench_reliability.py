# SPDX-License-Identifier: BSD-3-Clause
"""bench_reliability.py: how trials are judged, the tables, and the parts with little to do."""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.deadline import DEADLOCK, OPERATION
from support.repository import ROOT

pytest.importorskip("rich")

from launcher import hosts, ranks
from reliability import endurance, faults, kills, long_run, resources, restarts, tables
from reliability.cases import CASES, FAULT_STEP, TIMEOUT, Case
from reliability.trial import GRACE, End, Trial

from support.shaped_links import needs_hosts

PROGRAM = [sys.executable, str(ROOT / "benchmarks" / "bench_reliability.py")]
CLOSED = "RuntimeError: pair.cc:553] Connection closed by peer [10.77.0.2]:7598."
LATE = TIMEOUT + GRACE + 1


def _end(error: str = "", seconds: float = 1, digests: Sequence[str] = ("a", "b")) -> End:
    return End(int(bool(error)), list(digests), error, 0, seconds if error else None)


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
        ("unnamed", [_end(CLOSED), _end("RuntimeError: bad allocation")]),
        ("late", [_end(CLOSED), _end(CLOSED, LATE)]),
        ("crash", [_end(CLOSED), End(-6, ["a"], CLOSED)]),
        ("mixed", [_end(), _end(CLOSED)]),
        ("hung", [_end(CLOSED), End()]),
        ("wrong", [_end(CLOSED), _end(CLOSED, digests=["a", "c"])]),
        ("wrong", [_end(), _end(digests=["a"])]),
    ],
)
def test_the_worst_end_of_a_living_rank_is_the_outcome(outcome: str, ends: Sequence[End]) -> None:
    case = Case("a rank killed", "kill", 3, victim=1, steps=2)
    trial = _ended(case, ends[0], End(-9, ["another"]), ends[1])
    assert trial.outcome == outcome
    problems = faults.problems({"trials": [trial.record()]})
    assert bool(problems) == (outcome not in ("right", "error"))
    trial.orphans = [4711]
    assert trial.outcome == ("wrong" if outcome == "wrong" else "hung")


def test_a_stopped_rank_has_its_time_from_where_it_goes_on() -> None:
    trial = _ended(
        Case("a rank is stopped", "stop", seconds=40), _end(CLOSED, 20), _end(CLOSED, 42)
    )
    assert trial.outcome == "error"
    assert trial.record()["seconds_to_error"] == [2, 20]
    assert trial.record()["causes"] == ["Connection closed"]


def test_the_table_has_a_row_for_a_fault() -> None:
    case = Case("a rank killed", "kill", 3, victim=1, steps=2)
    plain = _ended(case, _end(CLOSED, 1), _end(), _end(CLOSED, 3)).record() | {"method": "plain"}
    ours = _ended(case, _end(), _end(), _end()).record()
    headings, rows = tables.faults({"trials": [plain, ours]})
    assert headings[2:4] == ["plain", "ours"]
    assert rows == [["a rank killed", "3", "error", "right", "1.0 to 3.0 / -"]]


def test_every_stage_of_a_kill_is_tried() -> None:
    assert {case.stage for case in CASES if case.kind == "kill"} == set(kills.STAGES)
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)


def _run(case: Case, reference: Sequence[str] = ()) -> Trial:
    """Runs a case of ours, with a generous time-out."""
    trial = Trial(case, "ours", reference, timeout=OPERATION)
    trial.run()
    return trial


@pytest.mark.parametrize(
    "stage",
    ["in backward, between buckets", pytest.param("in optimizer.step", marks=pytest.mark.long)],
)
def test_a_killed_rank_is_an_error_on_the_other(stage: str) -> None:
    trial = _run(Case("a rank killed", "kill", 2, stage=stage, steps=FAULT_STEP + 4))
    survivor, victim = trial.ends
    assert trial.outcome == "error", trial.ends
    assert victim.exitcode == -9
    assert len(survivor.digests) == FAULT_STEP + (stage == "in optimizer.step")


@pytest.mark.long
@needs_hosts
def test_a_rank_that_is_back_in_time_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "faults.json"
    words = ["--only", "cut off for 2 s", "stopped for 2 s", "--json", str(file)]
    words += ["--timeout", f"{OPERATION}"]
    subprocess.run([*PROGRAM, "faults", *words], check=True, timeout=2 * DEADLOCK)
    record: dict[str, Any] = json.loads(file.read_text())
    assert [trial["outcome"] for trial in record["trials"]] == ["right"] * 4
    show = [*PROGRAM, "faults", "--show", str(file)]
    shown = subprocess.run(
        show, check=True, capture_output=True, text=True, timeout=DEADLOCK
    ).stdout
    assert shown.count("right") == 4


@pytest.mark.long
def test_replicas_that_are_killed_cost_some_time(tmp_path: Path) -> None:
    pytest.importorskip("torchft")
    file = tmp_path / "replicas.json"
    words = ["--methods", "ours", "--steps", "200", "--every", "4", "--json", str(file)]
    subprocess.run([*PROGRAM, "replicas", *words], check=True, timeout=DEADLOCK)
    quiet, disturbed = json.loads(file.read_text())["results"]
    assert (quiet["kills"], disturbed["kills"] > 0) == (0, True)
    assert disturbed["loss"] == pytest.approx(quiet["loss"], abs=0.2)


@pytest.mark.long
def test_other_parameters_than_the_undisturbed_run_has_are_wrong() -> None:
    case = Case("nothing happens", "none", steps=3)
    trial = _run(case)
    assert trial.outcome == "right", trial.ends
    digests = trial.ends[0].digests
    assert _run(case, digests).outcome == "right"
    assert _run(case, [*digests[:2], "another"]).outcome == "wrong"


@pytest.mark.long
@needs_hosts
def test_a_kill_while_q_is_on_its_way_is_an_error() -> None:
    (case,) = (case for case in CASES if case.stage == "while q is on its way")
    trial = _run(case, _run(case.undisturbed()).ends[0].digests)
    assert trial.outcome == "error", trial.ends  # also: the parameters were right in every step
    next_rank, last_rank = trial.ends[case.victim + 1], trial.ends[case.victim - 1]
    assert len(next_rank.digests) == FAULT_STEP
    # The gather is a ring: this rank waits for the victim's own factor only, which may be sent.
    assert len(last_rank.digests) in (FAULT_STEP, FAULT_STEP + 1)


def test_unknown_words_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="no fault has any of these words: flood"):
        faults.chosen(argparse.Namespace(only=["flood"]))
    monkeypatch.setattr(hosts, "missing", lambda: ["root"])
    possible = faults.chosen(argparse.Namespace(only=None))
    assert possible
    assert {case.kind for case in possible} == {"kill"}


@needs_hosts
def test_many_starts_end_alike(tmp_path: Path) -> None:
    output = tmp_path / "record.json"
    options = ["--starts", "2", "--steps", "4", "--ranks", "2", "--json", str(output)]
    subprocess.run([*PROGRAM, "starts", *options], check=True, timeout=DEADLOCK, cwd=tmp_path)
    (result,) = json.loads(output.read_text())["results"]
    # The same parameters in both starts.
    assert result == {"ranks": 2, "endings": {"finished": 2}, "results": 1}


GROUPS = 30
TURN = 200  # steps; every call between steps comes within so many
SEED = 2  # of three kills, one at each moment
# Torch's flight recorder fills in the first steps, and callbacks get their threads. A tensor of
# each step would be 47 kB.
FEW_STEPS_GROWTH = 1000


def test_many_groups_leave_no_threads_and_no_files() -> None:
    args = (long_run.WORLD, GROUPS, True, GROUPS // 3)
    runs = ranks.call(long_run.groups, *args, what=f"{GROUPS} groups", seconds=DEADLOCK)
    assert endurance.problems({"runs": {"ours groups": runs}}, {"groups": float("inf")}) == []


@pytest.mark.long
def test_a_long_training_with_every_option_in_turns() -> None:
    steps = TURN * len(long_run.TURNS)
    args = (long_run.WORLD, steps, True, steps // 2, TURN)
    runs = ranks.call(long_run.train, *args, what=f"{steps} steps", seconds=3 * DEADLOCK)
    assert list(runs[0]["turns"]) == list(long_run.TURNS)
    assert not endurance.problems({"runs": {"ours steps": runs}}, {"steps": FEW_STEPS_GROWTH})


@pytest.mark.long
def test_a_job_that_is_killed_ends_with_the_bits_of_a_quiet_one(tmp_path: Path) -> None:
    file = tmp_path / "restarts.json"
    # The program fails if a bit differs.
    options = ["--kills", "3", "--steps", "120", "--seed", str(SEED), "--json", str(file)]
    subprocess.run([*PROGRAM, "restarts", *options], check=True, timeout=3 * DEADLOCK)
    record = json.loads(file.read_text())
    kills_of = record["killed"]["kills"]
    assert sum(sum(kill["ranks"]) for kill in kills_of.values()) == 3
    assert sum(kills_of["saving"]["ranks"]) >= 1
    assert sum(kills_of["training"]["ranks"]) >= 1
    assert record["killed"]["ranks"][0]["began"] > 0
    assert record["killed"]["other_failures"] == 0
    assert tables.restart_ends(record)[1][1][-1] == "equal to the bit"
    record["killed"]["ranks"][1]["losses"] = "another"
    assert restarts.problems(record) == ["the killed job ended with other bits: losses of rank 1"]


def test_a_plan_has_each_moment_on_each_rank() -> None:
    orders = restarts.plan(50, 0)
    assert len(orders) == 50
    assert orders == restarts.plan(50, 0)
    assert orders != restarts.plan(50, 1)
    for moment in restarts.MOMENTS:
        assert {order["rank"] for order in orders if order["moment"] == moment} == {0, 1}


def _flat(memory: Sequence[int], files: Sequence[int] = (9,) * 8) -> dict[str, Any]:
    samples = [[step, held, 3, 0, files[step]] for step, held in enumerate(memory)]
    turns = {"float32 factors": [1, 1e-7]}
    return {**resources.summary(samples, 2), "parameters": "a", "turns": turns, "error": 1e-7}


def test_growth_and_differences_are_problems() -> None:
    good = {"runs": {"ours steps": [_flat([10**6] * 8), _flat([10**6] * 8)]}}
    assert endurance.problems(good) == []
    assert _flat([5, 8, 11, 14, 17])["growth"] == pytest.approx(3)

    def spoiled(rank: int, **fields: Any) -> list[str]:
        bad = copy.deepcopy(good)
        bad["runs"]["ours steps"][rank] |= fields
        return endurance.problems(bad)

    assert spoiled(1, parameters="b") == ["the ranks' parameters differ"]
    growing = _flat([10**6 + 200 * step for step in range(8)])
    assert spoiled(1, **growing) == ["ours steps, rank 1: memory grows by 200 bytes per step"]
    leaking = _flat([10**6] * 8, files=range(9, 17))
    assert spoiled(0, **leaking) == ["ours steps, rank 0: files grow from 13 to 16"]
    for error in (1e-4, float("nan")):
        lost = {"float32 factors": [1, error]}
        assert spoiled(0, turns=lost) == [f"float32 factors: the sums differ by {error:.1e}"]
