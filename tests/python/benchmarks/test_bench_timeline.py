# SPDX-License-Identifier: BSD-3-Clause
"""bench_timeline.py: what its marks add up to, and its runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import bench_timeline
import pytest
from clock import covered
from cluster import timeline

from support.deadline import DEADLOCK
from support.repository import ROOT
from support.shaped_links import needs_hosts

OF_BUCKET = [
    *("ready", "project", "reduce_p", "collective", "collective_end", "received"),
    *("orthogonalize", "back_project", "reduce_q", "collective", "collective_end", "received"),
    *("reconstruct", "end"),
]


def _marks(first: list[int], second: list[int], late: int = 0) -> list[timeline.Mark]:
    """The marks of a step with two buckets, of which the second's may be late."""
    timed = [("forward", -1, -5), ("backward", -1, 0)]
    timed += [(name, 0, ms) for name, ms in zip(OF_BUCKET, first, strict=True)]
    timed += [(name, 1, ms + late) for name, ms in zip(OF_BUCKET, second, strict=True)]
    timed += [("optimizer", -1, 60), ("end", -1, 70)]
    return [(name, bucket, float(ms), 0.0) for name, bucket, ms in timed]


FIRST = [1, 1, 2, 2, 12, 13, 13, 14, 15, 22, 30, 30, 30, 31]
SECOND = [5, 12, 14, 14, 22, 31, 32, 33, 35, 36, 46, 48, 48, 50]


def test_collectives_of_one_communicator_take_turns() -> None:
    parts = timeline.parts_of(_marks(FIRST, SECOND), one_at_a_time=True)
    wire = {(part.bucket, part.name): part[3:] for part in parts if part.kind == timeline.WIRE}
    assert wire == {
        (0, "P on the wire"): (2, 12),
        (1, "P on the wire"): (14, 22),
        (0, "q on the wire"): (22, 30),
        (1, "q on the wire"): (36, 46),
    }
    early = [*FIRST[:9], 15, *FIRST[10:]]  # ready for q before the other bucket's P has ended
    assert timeline.parts_of(_marks(early, SECOND), one_at_a_time=True)[9].start == 22
    assert timeline.parts_of(_marks(early, SECOND), one_at_a_time=False)[9].start == 15


def test_phases_of_a_step_add_up() -> None:
    punctual, late = _marks(FIRST, SECOND), _marks(FIRST, SECOND, late=4)
    late = [mark if mark[0] != "collective_end" else (*mark[:2], mark[2] - 4, 0.0) for mark in late]
    of_one = timeline.phases([punctual], one_at_a_time=False)
    assert of_one["step"] == 75
    assert (of_one["forward"], of_one["backward"], of_one["optimizer"]) == (5, 5, 10)
    assert of_one["after backward"] == 55
    both = timeline.phases([punctual, late], one_at_a_time=False)
    for of in (of_one, both):
        after = ("computing", "waiting for a rank", "wire", "idle")
        assert sum(of[name] for name in after) == pytest.approx(of["after backward"])
    assert of_one["waiting for a rank"] == 0
    assert both["waiting for a rank"] > 0


def test_spans_that_overlap_count_once() -> None:
    assert covered([(8, 20), (0, 4), (2, 3), (3, 6)], (1, 10)) == 7
    assert covered([(5.0, 7.0), (1.0, 3.0), (2.0, 4.0), (2.5, 3.5)]) == 5
    assert covered([]) == 0


def test_the_default_buckets_are_those_recommended_for_gpus() -> None:
    arguments = bench_timeline.parse_arguments(["--device", "cuda"])
    assert arguments.model == "gpt2"
    titles = [contender.title for contender in arguments.contenders]
    assert titles[0] == "no synchronization"
    assert all("buckets of 100 MB" in title for title in titles[2:])


@pytest.mark.long
@needs_hosts
def test_shows_every_bucket(tmp_path: Path) -> None:
    output = tmp_path / "record.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_timeline.py"), "--ranks", "2"]
    command += ["--steps", "2", "--methods", "none", "int8-wire+start_powerSGD_iter=2:4"]
    subprocess.run([*command, "--json", str(output)], check=True, timeout=2 * DEADLOCK)
    record = json.loads(output.read_text())
    none, ours = record["methods"].values()
    assert [len(ours), len(ours[0])] == [2, 2]  # steps and ranks
    assert {name for name, *_ in none[0][0]} == {"forward", "backward", "optimizer", "end"}
    for marks in (marks for step in ours for marks in step):
        assert {bucket for _, bucket, *_ in marks} == {-1, 0, 1}
        parts = timeline.parts_of(marks, one_at_a_time=False)
        assert all(part.start <= part.end for part in parts)
        assert timeline.time_of("end", marks) >= max(part.end for part in parts)
    phases, *others = bench_timeline.tables(record).values()
    assert len(phases[1]) == 2
    assert len(others) == 2
