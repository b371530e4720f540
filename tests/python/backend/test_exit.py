# SPDX-License-Identifier: BSD-3-Clause
"""Ranks end whatever their program leaves behind: no hang, no core dump, its own exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.deadline import DEADLOCK

SCRIPT = Path(__file__).with_name("exit_programs.py")
# The exit codes of both ranks.
EXPECTED = {
    "reduces_and_destroys": [0, 0],
    "trains_and_does_not_destroy": [0, 0],
    "does_not_compress_and_does_not_destroy": [0, 0],
    "keeps_everything": [0, 0],
    "destroys_and_keeps_everything": [0, 0],
    "leaves_answered_works": [0, 0],
    "leaves_a_work_that_nobody_answers": [0, 0],
    "leaves_a_work_while_the_peer_lives": [0, 0],
    "aborts_while_the_peer_lives": [0, 0],
    "exits_with_a_work_in_flight": [3, 3],
    "exits_with_an_exact_work_in_flight": [0, 0],
    "exits_while_a_callback_runs": [0, 0],
}
# The exit codes of each run by program, and the standard error of all ranks.
Ended = tuple[dict[str, list[list[int]]], str]


def _run(folder: Path, programs: list[str]) -> Ended:
    ended = subprocess.run(
        [sys.executable, SCRIPT, folder, *programs],
        capture_output=True,
        text=True,
        timeout=5 * DEADLOCK,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout), ended.stderr


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return _run(tmp_path_factory.mktemp("stores"), [*EXPECTED, "reduces_and_destroys"])


@pytest.mark.parametrize("program", EXPECTED)
def test_exit_codes(ended: Ended, program: str) -> None:
    codes, stderr = ended
    for each in codes[program]:
        assert each == EXPECTED[program], stderr


def test_a_job_that_compressed_nothing_says_so_at_its_exit(ended: Ended) -> None:
    _, stderr = ended
    said = "nothing has been compressed in 3 steps: compression starts at step 1000"
    assert stderr.count(said) == 1  # one rank speaks
    assert "No backend of type" not in stderr


@pytest.mark.long
def test_fifty_starts_and_exits_in_a_row(tmp_path: Path) -> None:
    codes, stderr = _run(tmp_path, ["reduces_and_destroys"] * 50)
    assert codes["reduces_and_destroys"] == [[0, 0]] * 50, stderr
