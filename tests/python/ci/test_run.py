# SPDX-License-Identifier: BSD-3-Clause
""".ci/run runs every step, and its exit status tells of each that fails."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from support.repository import ROOT

GOALS = "tools lint docs test-cpp test-python test-sanitized gpu-programs test-aarch64"
SCRIPTS = [".ci/other_pythons.sh", ".ci/check_kernels.py", ".ci/cuda_torch.sh"]
TOOLS = ["make", "python3", "nvcc", "aarch64-linux-gnu-g++", "qemu-aarch64"]  # here, stand-ins
STAND_IN = """#!/bin/sh
case " $FAILING " in *" ${1:-$0} "*) exit 1 ;; esac
"""


@pytest.mark.parametrize("failing", [[], ["docs", "test-cpp", ".ci/cuda_torch.sh"]])
def test_all_steps_run_and_those_that_fail_are_named(tmp_path: Path, failing: list[str]) -> None:
    for name in [*SCRIPTS, *TOOLS]:
        file = tmp_path / (name if name in SCRIPTS else f"bin/{name}")
        file.parent.mkdir(exist_ok=True)
        file.write_text(STAND_IN)
        file.chmod(0o755)
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "FAILING": " ".join(failing)}
    command = [tmp_path / ".ci" / "run"]
    ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    steps = re.findall(r"^(ok|FAILED) \d+ s: (?:make |python3 )?(\S+)$", ended.stdout, re.MULTILINE)
    assert {step for _, step in steps} == {*GOALS.split(), *SCRIPTS}
    assert {step for verdict, step in steps if verdict == "FAILED"} == set(failing)
    assert ended.returncode == bool(failing)
