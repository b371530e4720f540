# SPDX-License-Identifier: BSD-3-Clause
"""bench_faults.py: how a trial is judged, the table, and a few faults that pass quickly."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.repository import ROOT

pytest.importorskip("rich")

import bench_faults
from cluster import hosts
from faults import kills, tables
from faults.cases import CASES, TIMEOUT, Case
from faults.rank import FAULT_STEP
from faults.trial import GRACE, End, Trial

from support.shaped_links import needs_hosts

CLOSED = "RuntimeError: pair.cc:553] Connection closed by peer [10.77.0.2]:7598."
LATE = TIMEOUT + GRACE + 1


def _end(rank: int, error: str = "", seconds: float = 1, right: bool = True) -> End:
    return End(rank, int(bool(error)), seconds, seconds, 30, error, right)


@pytest.mark.parametrize(
    ("outcome", "ends"),
    [
        ("right", [_end(0), _end(2)]),
        ("error", [_end(0, CLOSED), _end(2, "ValueError: rank 1 has not called attach")]),
        ("error", [_end(0, CLOSED), _end(2, "DistStoreError: wait timeout after 20000ms")]),
        ("unnamed", [_end(0, CLOSED), _end(2, "RuntimeError: bad allocation")]),
        ("late", [_end(0, CLOSED), _end(2, CLOSED, LATE)]),
        ("crash", [_end(0, CLOSED), End(2, -6, 1.0, 1.0, 12, CLOSED)]),
        ("mixed", [_end(0), _end(2, CLOSED)]),
        ("hung", [_end(0, CLOSED), End(2, None, None, None)]),
        ("wrong", [_end(0, CLOSED), _end(2, CLOSED, right=False)]),
    ],
)
def test_the_worst_end_of_a_living_rank_is_the_outcome(outcome: str, ends: Sequence[End]) -> None:
    trial = Trial(Case("a rank killed", "kill", 3, victim=1), "ours")
    trial.ends = [ends[0], End(1, -9, 0.0, 0.0, right=False), ends[1]]
    assert trial.outcome == outcome
    trial.orphans = [4711]
    assert trial.outcome == ("wrong" if outcome == "wrong" else "hung")


def test_a_stopped_rank_has_its_time_from_where_it_goes_on() -> None:
    trial = Trial(Case("a rank is stopped", "stop", seconds=40), "ours")
    trial.ends = [_end(0, CLOSED, 20), _end(1, CLOSED, 42)]
    assert trial.outcome == "error"
    assert trial.record()["seconds_to_error"] == [20, 2]


def test_the_table_has_a_row_for_a_fault() -> None:
    case = Case("a rank killed", "kill", 3, victim=1)
    trials = [Trial(case, method) for method in ("plain", "ours")]
    trials[0].ends = [_end(0, CLOSED, 1), _end(1), _end(2, CLOSED, 3)]
    trials[1].ends = [_end(0), _end(1), _end(2)]
    record = {"trials": [trial.record() for trial in trials]}
    headings, rows = tables.faults(record)
    assert headings[2:4] == ["plain", "ours"]
    assert rows == [["a rank killed", "3", "error", "right", "1.0 to 3.0 / -"]]


def test_every_stage_of_a_kill_is_tried() -> None:
    assert {case.stage for case in CASES if case.kind == "kill"} == set(kills.STAGES)
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)


def _run(case: Case, reference: Sequence[str] = ()) -> Trial:
    """Runs a case of ours, with a generous time-out."""
    trial = Trial(case, "ours", reference, timeout=60)
    for _ in bench_faults.run_in_turns([trial], 1):
        pass
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
    assert survivor.steps == FAULT_STEP + (stage == "in optimizer.step")


@pytest.mark.long
@needs_hosts
def test_a_rank_that_is_back_in_time_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "faults.json"
    words = ["--only", "cut off for 2 s", "stopped for 2 s", "--json", str(file)]
    script = [sys.executable, str(ROOT / "benchmarks" / "bench_faults.py"), "--timeout", "60"]
    subprocess.run([*script, *words], check=True, timeout=400)
    record: dict[str, Any] = json.loads(file.read_text())
    assert [trial["outcome"] for trial in record["trials"]] == ["right"] * 4
    shown = subprocess.run(
        [*script, "--show", str(file)], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    assert shown.count("right") == 4


@pytest.mark.long
def test_other_parameters_than_the_undisturbed_run_has_are_wrong() -> None:
    case = Case("nothing happens", "none", steps=3)
    trial = _run(case)
    assert trial.outcome == "right", trial.ends
    assert _run(case, trial.digests).outcome == "right"
    assert _run(case, [*trial.digests[:2], "another"]).outcome == "wrong"


@pytest.mark.long
@needs_hosts
def test_a_kill_while_q_is_on_its_way_is_an_error() -> None:
    (case,) = (case for case in CASES if case.stage == "while q is on its way")
    trial = _run(case, _run(case.undisturbed()).digests)
    assert trial.outcome == "error", trial.ends  # also: the parameters were right in every step
    next_rank, last_rank = trial.ends[case.victim + 1], trial.ends[case.victim - 1]
    assert next_rank.steps == FAULT_STEP
    # The gather is a ring: this rank waits for the victim's own factor only, which may be sent.
    assert last_rank.steps in (FAULT_STEP, FAULT_STEP + 1)


def test_unknown_words_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="no fault has any of these words: flood"):
        bench_faults.chosen(bench_faults.parse_arguments(["--only", "flood"]))
    monkeypatch.setattr(hosts, "missing", lambda: ["root"])
    possible = bench_faults.chosen(bench_faults.parse_arguments([]))
    assert possible
    assert {case.kind for case in possible} == {"kill"}
