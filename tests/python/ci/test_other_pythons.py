# SPDX-License-Identifier: BSD-3-Clause
""".ci/other_pythons.sh takes the oldest and the newest Python, and fails where a step does."""

import os
import subprocess
from pathlib import Path

import pytest

from support.repository import ROOT

# A Python whose environments have another like it
PYTHON = """#!/bin/sh
echo "$0 $*"
if [ "$1 $2" = "-m venv" ]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; fi
case "$*" in *"$FAILING"*) exit 1 ;; esac
"""
FILES = {
    "pyenv/versions/3.10.9/bin/python3.10": PYTHON,
    "bin/python3.10": "#!/bin/sh\nexit 127\n",  # a shim of a version that pyenv has not chosen
    "bin/python3.12": PYTHON,
    "bin/python3.14": PYTHON,
}


@pytest.mark.parametrize("failing", ["none", "-m pip", "compileall", "build_ext", "two_ranks.py"])
def test_all_steps_run_with_the_oldest_and_the_newest(tmp_path: Path, failing: str) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "PYENV_ROOT": f"{tmp_path}/pyenv",
        "PYTHON_ENVS": f"{tmp_path}/envs",
        "FAILING": failing,
    }
    command = [str(ROOT / ".ci/other_pythons.sh")]
    ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert (ended.returncode == 0) == (failing == "none")
    trained = [line for line in ended.stdout.splitlines() if "two_ranks.py" in line]
    assert failing != "none" or trained == [
        f"{tmp_path}/envs/python3.{minor}-torch--2.13.0/bin/python .ci/two_ranks.py"
        for minor in (10, 14)
    ]
