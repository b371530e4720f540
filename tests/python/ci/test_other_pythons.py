# SPDX-License-Identifier: BSD-3-Clause
""".ci/other_pythons.sh uses the oldest and the newest Python, and fails where either does."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from support.deadline import DEADLOCK
from support.repository import ROOT

SCRIPT = ROOT / ".ci" / "other_pythons.sh"
# Any Python: the environment that it makes has another like it.
STAND_IN = """#!/bin/sh
echo "$(basename "$0") of $(basename "$(dirname "$(dirname "$0")")"): $*"
if [ "$1 $2" = "-m venv" ]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; fi
case "$*" in *"$FAILING"*) exit 1 ;; esac
"""


def _run(folder: Path, failing: str) -> subprocess.CompletedProcess[str]:
    """Runs the script where Python 3.10 is pyenv's, 3.14 is on PATH, and no other is tried."""
    for name in ("tree/.ci", "pyenv/versions/3.10.9/bin", "bin", "envs"):
        (folder / name).mkdir(parents=True)
    shutil.copy(SCRIPT, folder / "tree/.ci")
    shutil.copy(ROOT / "pyproject.toml", folder / "tree")
    for name in ("LICENSE", "README.md", "setup.py"):
        (folder / "tree" / name).touch()
    for name in ("setup_support", "csrc", "include", "python/torch_powersgd"):
        (folder / "tree" / name).mkdir(parents=True)
    for name in ("benchmarks", "docs", "examples", "tests"):
        (folder / "tree" / name).mkdir()
    for name in ("pyenv/versions/3.10.9/bin/python3.10", "bin/python3.14"):
        (folder / name).write_text(STAND_IN)
        (folder / name).chmod(0o755)
    # A shim of a version that pyenv has not chosen
    (folder / "bin/python3.10").write_text("#!/bin/sh\nexit 127\n")
    (folder / "bin/python3.10").chmod(0o755)
    return subprocess.run(
        [folder / "tree/.ci/other_pythons.sh"],
        env={
            **os.environ,
            "PATH": os.pathsep.join([str(folder / "bin"), os.environ["PATH"]]),
            "PYENV_ROOT": str(folder / "pyenv"),
            "PYTHON_ENVS": str(folder / "envs"),
            "TORCH": "torch==2.13.0",
            "FAILING": failing,
        },
        capture_output=True,
        text=True,
        timeout=DEADLOCK,
    )


def test_it_trains_with_the_oldest_and_the_newest(tmp_path: Path) -> None:
    ended = _run(tmp_path, "nothing")
    assert ended.returncode == 0, ended.stderr
    trained = [line for line in ended.stdout.splitlines() if "two_ranks.py" in line]
    envs = ["python3.10-torch--2.13.0", "python3.14-torch--2.13.0"]
    assert trained == [f"python of {env}: .ci/two_ranks.py" for env in envs]


@pytest.mark.parametrize("step", ["-m pip", "compileall", "build_ext", "two_ranks.py"])
def test_it_fails_where_a_step_fails(tmp_path: Path, step: str) -> None:
    assert _run(tmp_path, step).returncode != 0
