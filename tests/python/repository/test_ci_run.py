# SPDX-License-Identifier: BSD-3-Clause
""".ci/run runs every step, and its exit status tells of each that fails."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from support.repository import ROOT

# There is a stand-in for nvcc.
STEPS = ["tools", "lint", "docs", "test-python", "test-cpp", "test-sanitized", "gpu-programs"]


def _run(folder: Path, fails: str) -> tuple[int, str]:
    """Runs .ci/run where make and nvcc's scripts only print their goals."""
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci" / "run")
    stand_ins = folder / "bin"
    stand_ins.mkdir()
    program = f'#!/bin/sh\necho "output of ${{1:-$0}}"\n[ "${{1:-$0}}" != {fails} ]\n'
    script = folder / ".ci"
    for file in (stand_ins / "make", stand_ins / "nvcc", script / "nvcc_report.sh"):
        file.write_text(program)
        file.chmod(0o755)
    shutil.copy(script / "nvcc_report.sh", script / "cuda_torch.sh")
    path = os.pathsep.join([str(stand_ins), os.environ["PATH"]])
    ended = subprocess.run(
        [folder / ".ci" / "run"],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return ended.returncode, ended.stdout


def test_all_steps_run(tmp_path: Path) -> None:
    status, output = _run(tmp_path, "nothing")
    assert status == 0
    for step in [*STEPS, ".ci/nvcc_report.sh", ".ci/cuda_torch.sh"]:
        assert f"output of {step}\n" in output
    assert len(re.findall(r"^ok \d+ s: ", output, re.MULTILINE)) == len(STEPS) + 2


@pytest.mark.parametrize("fails", [*STEPS, ".ci/cuda_torch.sh"])
def test_a_step_that_fails_stops_no_other(tmp_path: Path, fails: str) -> None:
    status, output = _run(tmp_path, fails)
    assert status == 1
    assert re.findall(r"^FAILED \d+ s: (?:make )?(\S+)$", output, re.MULTILINE) == [fails]
    assert len(re.findall(r"^ok \d+ s: ", output, re.MULTILINE)) == len(STEPS) + 1
