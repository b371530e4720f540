# SPDX-License-Identifier: BSD-3-Clause
""".ci/system_packages on machines that lack some packages, and CMake without GoogleTest.

The machine is a folder of stand-ins, the only one on PATH. Each file in its folder `installed` is a
package that it has.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from support.repository import ROOT

PYTHON = ["python3-venv", "python3-dev"]
BUILD = [*PYTHON, "g++"]
REQUIRED = [*BUILD, "cmake", "libboost-context-dev"]
OPTIONAL = ["libgtest-dev", "ccache"]
COMMANDS = ["g++", "cmake", "ccache"]

STAND_INS = {
    "python3": """
case $2 in
  *ensurepip*) [[ -e $MACHINE/installed/$SYSTEM_PYTHON-venv ]] ;;
  *Python.h*) [[ -e $MACHINE/installed/$SYSTEM_PYTHON-dev ]] ;;
esac""",
    "g++": """
read -r line
case $line in
  *boost/context*) [[ -e $MACHINE/installed/libboost-context-dev ]] ;;
  *gtest/gtest.h*) [[ -e $MACHINE/installed/libgtest-dev ]] ;;
  *) exit 1 ;;
esac""",
    "cmake": "",
    "ccache": "",
    "id": "echo $USER_ID",
    "sudo": """
[[ $1 == -n && -e $MACHINE/may_sudo ]] || exit 1
shift
USER_ID=0 exec "$@" """,
    "apt-get": """
echo "$*" >>"$MACHINE/calls"
[[ $USER_ID == 0 && ! -e $MACHINE/offline ]] || { echo "E: no" >&2; exit 100; }
[[ $2 == install ]] || exit 0
for package in "${@:3}"; do
  [[ $package == -* ]] || touch "$MACHINE/installed/$package"
  [[ ! -e $MACHINE/shelf/$package ]] || ln -sf "../shelf/$package" "$MACHINE/bin/$package"
done""",
}


class Machine:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("bin", "shelf", "installed"):
            (folder / name).mkdir()
        for name, body in STAND_INS.items():
            self.script(f"{'shelf' if name in COMMANDS else 'bin'}/{name}", body)
        for name in ("bash", "env", "mktemp", "rm", "tail", "touch", "ln", "true"):
            path = shutil.which(name)
            assert path is not None
            (folder / "bin" / name).symlink_to(path)

    def script(self, name: str, body: str) -> None:
        file = self.folder / name
        file.write_text(f"#!{shutil.which('bash')}\n{body}\n")
        file.chmod(0o755)

    def install(self, *packages: str) -> None:
        for package in packages:
            (self.folder / "installed" / package).touch()
            if package in COMMANDS:
                (self.folder / "bin" / package).symlink_to(self.folder / "shelf" / package)

    def run(self, what: str, user: int, python: str = "python3") -> tuple[int, list[str]]:
        """The exit status and the lines of the output, to which errors belong."""
        environment = {
            "PATH": str(self.folder / "bin"),
            "MACHINE": str(self.folder),
            "USER_ID": str(user),
            "SYSTEM_PYTHON": python,
        }
        ended = subprocess.run(
            [str(ROOT / ".ci/system_packages"), what],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return ended.returncode, ended.stdout.splitlines()

    def installed_by_apt(self) -> list[str]:
        """The packages of each call of apt."""
        calls = self.folder / "calls"
        lines = calls.read_text().splitlines() if calls.exists() else []
        install = "-qq install --yes --no-install-recommends "
        assert lines[::2] == ["-qq update"] * len(lines[::2])
        assert all(line.startswith(install) for line in lines[1::2])
        return [line.removeprefix(install) for line in lines[1::2]]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize("user", [0, 1000])
def test_root_and_sudo_install_all_in_one_line(machine: Machine, user: int) -> None:
    (machine.folder / "may_sudo").touch()
    packages = " ".join(REQUIRED + OPTIONAL)
    assert machine.run("tests", user) == (0, [f"installing with apt: {packages}"])
    assert machine.run("tests", user) == (0, [])
    assert machine.installed_by_apt() == [packages]


def test_a_user_is_told_the_one_command(machine: Machine) -> None:
    machine.install("g++", "libgtest-dev")
    (machine.folder / "bin/python3").unlink()
    missing = " ".join(["python3", *PYTHON, "cmake", "libboost-context-dev", "ccache"])
    said = [
        f"The system lacks {missing}. On Debian or Ubuntu, this installs all of it:",
        f"  sudo apt-get update && sudo apt-get install --yes {missing}",
    ]
    assert machine.run("tests", user=1000) == (1, said)
    assert machine.installed_by_apt() == []
    (machine.folder / "bin/apt-get").unlink()
    assert machine.run("tests", user=0) == (1, said)


def test_googletest_and_ccache_stop_nobody(machine: Machine) -> None:
    machine.install(*REQUIRED)
    assert machine.run("tests", user=1000) == (0, [])
    (machine.folder / "offline").touch()
    assert machine.run("tests", user=0)[0] == 0


def test_arm_takes_a_cross_compiler_and_an_emulator(machine: Machine) -> None:
    machine.install(*REQUIRED)
    status, (missing, _) = machine.run("aarch64", user=1000)
    assert status == 1
    assert missing.startswith("The system lacks g++-aarch64-linux-gnu qemu-user ")
    machine.script("bin/aarch64-linux-gnu-g++", "")
    machine.script("bin/qemu-aarch64", "")
    assert machine.run("aarch64", user=1000) == (0, [])


def test_an_apt_that_fails_is_reported(machine: Machine) -> None:
    (machine.folder / "offline").touch()
    status, (_, error, remedy) = machine.run("build", user=0)
    assert (status, error) == (1, "E: no")
    assert remedy.startswith(f"apt did not install {' '.join(BUILD)}. The command was: apt-get ")


def test_another_python_has_packages_of_its_own(machine: Machine) -> None:
    machine.script("bin/python3.12", STAND_INS["python3"])
    machine.install("g++", *PYTHON)
    assert machine.run("build", user=0, python="python3.12")[0] == 0
    assert machine.installed_by_apt() == ["python3.12-venv python3.12-dev"]


@pytest.mark.parametrize(
    ("goal", "packages"), [("test", "tests"), ("test-aarch64", "aarch64"), ("demo", "build")]
)
def test_make_asks_once_for_all(goal: str, packages: str) -> None:
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("M")}
    command = ["make", "--dry-run", goal]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    calls = [line.split()[-2:] for line in result.stdout.splitlines() if "system_packages" in line]
    assert calls == [[".ci/system_packages", packages]]


@pytest.fixture
def configure(tmp_path: Path) -> Callable[..., str]:
    """Configures a project that needs GoogleTest, on a system without it. Returns the errors."""
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("there is no cmake")
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.18)\nproject(needs_googletest LANGUAGES NONE)\n"
        f'include("{ROOT}/tests/cpp/googletest.cmake")\n'
        'if(NOT TARGET GTest::gtest)\n  message(FATAL_ERROR "no target")\nendif()\n'
    )

    def run(**variables: object) -> str:
        defines = [f"-D{name}={value}" for name, value in variables.items()]
        command = [cmake, "-S", str(tmp_path), "-B", str(tmp_path / "build"), *defines]
        command.append("-DCMAKE_DISABLE_FIND_PACKAGE_GTest=ON")
        ended = subprocess.run(command, capture_output=True, text=True)
        assert ended.returncode == ended.stderr.count("CMake Error")
        return " ".join(ended.stderr.split())

    return run


def test_googletest_is_downloaded_or_the_error_names_the_remedy(
    configure: Callable[..., str], tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong.tar.gz"
    assert "sudo apt-get install libgtest-dev" in configure(POWERSGD_GTEST_URL=f"file://{wrong}")
    wrong.touch()
    assert "its SHA-256 is" in configure(POWERSGD_GTEST_URL=f"file://{wrong}")
    assert "POWERSGD_GTEST_URL names no place" in configure(POWERSGD_GTEST_URL="")
    sources = tmp_path / "googletest"
    sources.mkdir()
    (sources / "CMakeLists.txt").write_text(
        "add_library(gtest INTERFACE)\nadd_library(GTest::gtest ALIAS gtest)\n"
    )
    assert "CMake Error" not in configure(FETCHCONTENT_SOURCE_DIR_GOOGLETEST=sources)
