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
  *ensurepip*) [[ -e $MACHINE/installed/$NAME-venv ]] ;;
  *Python.h*) [[ -e $MACHINE/installed/$NAME-dev ]] ;;
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
            place = "shelf" if name in COMMANDS else "bin"
            self.script(f"{place}/{name}", body)
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

    def run(
        self, what: str, user: int, python: str = "python3"
    ) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": str(self.folder / "bin"),
            "MACHINE": str(self.folder),
            "USER_ID": str(user),
            "SYSTEM_PYTHON": python,
            "NAME": python,
        }
        return subprocess.run(
            [str(ROOT / ".ci/system_packages"), what],
            env=environment,
            capture_output=True,
            text=True,
        )

    def apt_calls(self) -> list[str]:
        calls = self.folder / "calls"
        return calls.read_text().splitlines() if calls.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def _installs(packages: list[str]) -> list[str]:
    return [
        "-qq update",
        f"-qq install --yes --no-install-recommends {' '.join(packages)}",
    ]


def test_root_has_all_installed_in_one_line(machine: Machine) -> None:
    result = machine.run("tests", user=0)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"installing with apt: {' '.join(REQUIRED + OPTIONAL)}\n"
    assert machine.apt_calls() == _installs(REQUIRED + OPTIONAL)
    again = machine.run("tests", user=0)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert len(machine.apt_calls()) == 2


def test_sudo_without_a_password_serves_as_well(machine: Machine) -> None:
    (machine.folder / "may_sudo").touch()
    result = machine.run("build", user=1000)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"installing with apt: {' '.join(BUILD)}\n"
    assert machine.apt_calls() == _installs(BUILD)


def test_a_user_is_told_the_one_command(machine: Machine) -> None:
    machine.install("g++", "libgtest-dev")
    result = machine.run("tests", user=1000)
    assert result.returncode == 1
    missing = " ".join([*PYTHON, "cmake", "libboost-context-dev", "ccache"])
    assert result.stderr.splitlines() == [
        f"The system lacks {missing}. On Debian or Ubuntu, this installs all of it:",
        f"  sudo apt-get update && sudo apt-get install --yes {missing}",
    ]
    assert machine.apt_calls() == []


def test_without_apt_root_is_told_as_well(machine: Machine) -> None:
    (machine.folder / "bin/apt-get").unlink()
    result = machine.run("build", user=0)
    assert result.returncode == 1
    assert f"lacks {' '.join(BUILD)}." in result.stderr


def test_what_is_there_is_left_alone(machine: Machine) -> None:
    machine.install(*REQUIRED, *OPTIONAL)
    result = machine.run("tests", user=1000)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_googletest_and_ccache_stop_nobody(machine: Machine) -> None:
    machine.install(*REQUIRED)
    result = machine.run("tests", user=1000)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    (machine.folder / "offline").touch()
    assert machine.run("tests", user=0).returncode == 0


def test_an_apt_that_fails_is_reported(machine: Machine) -> None:
    (machine.folder / "offline").touch()
    result = machine.run("build", user=0)
    assert result.returncode == 1
    first, last = result.stderr.splitlines()
    assert first == "E: no"
    assert last.startswith(f"apt did not install {' '.join(BUILD)}. The command was: apt-get ")


def test_another_python_has_packages_of_its_own(machine: Machine) -> None:
    machine.script("bin/python3.12", STAND_INS["python3"])
    machine.install("g++", *PYTHON)
    result = machine.run("build", user=0, python="python3.12")
    assert result.returncode == 0, result.stderr
    assert machine.apt_calls() == _installs(["python3.12-venv", "python3.12-dev"])


def test_a_python_that_is_missing_comes_with_the_rest(machine: Machine) -> None:
    (machine.folder / "bin/python3").unlink()
    machine.install("g++")
    result = machine.run("build", user=1000)
    assert f"install --yes python3 {' '.join(PYTHON)}\n" in result.stderr


def test_an_unknown_set_is_refused(machine: Machine) -> None:
    assert machine.run("everything", user=0).returncode == 2


@pytest.mark.parametrize(
    ("goal", "packages"),
    [("test", "tests"), ("test-cpp", "tests"), ("test-sanitized", "tests"), ("demo", "build")],
)
def test_make_asks_once_for_all(goal: str, packages: str) -> None:
    make = shutil.which("make")
    if make is None:
        pytest.skip("there is no make")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    environment.pop("MFLAGS", None)
    command = [make, "--dry-run", goal]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    calls = [line.split()[-2:] for line in result.stdout.splitlines() if "system_packages" in line]
    assert calls == [[".ci/system_packages", packages]]


@pytest.fixture
def configure(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Configures a project that needs GoogleTest, on a system without it."""
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("there is no cmake")
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.18)\nproject(needs_googletest LANGUAGES CXX)\n"
        f'include("{ROOT}/tests/cpp/googletest.cmake")\n'
        'if(NOT TARGET GTest::gtest)\n  message(FATAL_ERROR "no target")\nendif()\n'
    )

    def run(**variables: object) -> subprocess.CompletedProcess[str]:
        defines = [f"-D{name}={value}" for name, value in variables.items()]
        command = [cmake, "-S", str(tmp_path), "-B", str(tmp_path / "build"), *defines]
        command.append("-DCMAKE_DISABLE_FIND_PACKAGE_GTest=ON")
        return subprocess.run(command, capture_output=True, text=True)

    return run


def test_a_download_that_fails_names_the_remedy(
    configure: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong.tar.gz"
    result = configure(POWERSGD_GTEST_URL=f"file://{wrong}")
    assert result.returncode != 0
    assert result.stderr.count("CMake Error") == 1
    assert "sudo apt-get install libgtest-dev" in " ".join(result.stderr.split())
    result = configure(POWERSGD_GTEST_URL="")
    assert result.returncode != 0
    assert "GoogleTest is not installed, and POWERSGD_GTEST_URL names no place" in result.stderr
    wrong.touch()
    assert "its SHA-256 is" in configure(POWERSGD_GTEST_URL=f"file://{wrong}").stderr


def test_a_system_without_googletest_takes_the_sources(
    configure: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    sources = tmp_path / "googletest"
    sources.mkdir()
    (sources / "CMakeLists.txt").write_text(
        "add_library(gtest INTERFACE)\nadd_library(GTest::gtest ALIAS gtest)\n"
    )
    result = configure(FETCHCONTENT_SOURCE_DIR_GOOGLETEST=sources)
    assert result.returncode == 0, result.stderr
