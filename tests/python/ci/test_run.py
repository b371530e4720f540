# SPDX-License-Identifier: BSD-3-Clause
""".ci/run runs every step, and its exit status tells of each that fails."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from support.deadline import DEADLOCK
from support.repository import ROOT

STEPS = ["tools", "lint", "docs", "test-python", "test-cpp", "test-sanitized"]
# These need compilers and an emulator, for which there are stand-ins.
STEPS += [
    ".ci/other_pythons.sh",
    "gpu-programs",
    ".ci/nvcc_report.sh",
    ".ci/cuda_torch.sh",
    "test-aarch64",
]
TOOLS = ["nvcc", "aarch64-linux-gnu-g++", "qemu-aarch64"]
SCRIPTS = [".ci/other_pythons.sh", ".ci/nvcc_report.sh", ".ci/cuda_torch.sh"]

STAND_IN = """#!/bin/sh
step=${1:-$0}
echo "output of $step"
case " $FAILING " in *" $step "*) exit 1 ;; esac
"""


@pytest.mark.parametrize("failing", [[], ["docs", "test-cpp", ".ci/cuda_torch.sh"]])
def test_all_steps_run_and_those_that_fail_are_named(tmp_path: Path, failing: list[str]) -> None:
    for file in (*SCRIPTS, *(f"bin/{tool}" for tool in ["make", *TOOLS])):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(STAND_IN)
        (tmp_path / file).chmod(0o755)
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    ended = subprocess.run(
        [tmp_path / ".ci" / "run"],
        env={**os.environ, "PATH": path, "FAILING": " ".join(failing)},
        capture_output=True,
        text=True,
        timeout=DEADLOCK,
    )
    verdicts = re.findall(r"^(ok|FAILED) \d+ s: (?:make )?(\S+)$", ended.stdout, re.MULTILINE)
    assert sorted(step for _, step in verdicts) == sorted(STEPS)
    assert [step for step in STEPS if ("FAILED", step) in verdicts] == failing
    assert all(f"output of {step}\n" in ended.stdout for step in STEPS)
    assert ended.returncode == bool(failing)
