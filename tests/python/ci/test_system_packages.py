# SPDX-License-Identifier: BSD-3-Clause
""".ci/system_packages on a machine of stand-ins, which lacks some packages."""

import shutil
import subprocess
from pathlib import Path

import pytest

from support.repository import ROOT

STAND_INS = {
    "python3": """[[ $2 != *ensurepip* || $MISSING != *python3-venv* ]] &&
      [[ $2 != *Python.h* || $MISSING != *python3-dev* ]]""",
    "g++": """read -r line; [[ $line != *boost* || $MISSING != *boost* ]] &&
      [[ $line != *gtest* || $MISSING != *gtest* ]]""",
    "cmake": "",
    "ccache": "",
    "id": "echo 1000",
    "sudo": "[[ $SUDO == yes ]] && ${@:2}",
    "apt-get": "[[ $2 != install ]] || echo ${@:5} >installed",
    "env": "${@:2}",
}


@pytest.mark.parametrize(
    ("what", "missing", "sudo", "status"),
    [
        ("build", "python3-venv python3-dev", "yes", 0),
        ("tests", "libboost-context-dev libgtest-dev", "yes", 0),
        ("tests", "libboost-context-dev libgtest-dev", "no", 1),
        ("tests", "libgtest-dev", "no", 0),  # CMake downloads it
        ("aarch64", "g++-aarch64-linux-gnu qemu-user", "no", 1),
    ],
)
def test_packages(tmp_path: Path, what: str, missing: str, sudo: str, status: int) -> None:
    bash = str(shutil.which("bash"))
    for name, body in STAND_INS.items():
        (tmp_path / name).write_text(f"#!{bash}\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": str(tmp_path), "MISSING": missing, "SUDO": sudo}
    command = [bash, str(ROOT / ".ci/system_packages"), what]
    ended = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == status
    installed = tmp_path / "installed"
    assert (installed.read_text() if installed.exists() else "") == f"{missing}\n" * (sudo == "yes")
    assert (f"apt-get install --yes {missing}\n" in ended.stderr) == (status == 1)
