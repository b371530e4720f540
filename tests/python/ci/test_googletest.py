# SPDX-License-Identifier: BSD-3-Clause
"""Without GoogleTest, tests/cpp/googletest.cmake downloads it, or its error names the remedy."""

import shutil
import subprocess
from pathlib import Path

import pytest

from support.repository import ROOT

PROJECT = f"""cmake_minimum_required(VERSION 3.18)
project(needs_googletest LANGUAGES NONE)
include("{ROOT}/tests/cpp/googletest.cmake")
"""


@pytest.mark.skipif(shutil.which("cmake") is None, reason="there is no cmake")
@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("file:///absent.tar.gz", "sudo apt-get install libgtest-dev"),
        ("file://{}/CMakeLists.txt", "its SHA-256 is"),
        ("", "POWERSGD_GTEST_URL names no place"),
    ],
)
def test_the_error_names_the_remedy(tmp_path: Path, url: str, error: str) -> None:
    (tmp_path / "CMakeLists.txt").write_text(PROJECT)
    defines = [
        f"-DPOWERSGD_GTEST_URL={url.format(tmp_path)}",
        "-DCMAKE_DISABLE_FIND_PACKAGE_GTest=ON",
    ]
    command = ["cmake", f"-S{tmp_path}", f"-B{tmp_path}/build", *defines]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 1
    assert error in " ".join(ended.stderr.split())
