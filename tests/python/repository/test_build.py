# SPDX-License-Identifier: BSD-3-Clause
"""setup.py examines the CUDA toolkit before it compiles, and reports what it builds."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from setuptools import Distribution

from setup_support import progress, together, toolkit
from support.repository import ROOT

WHOLE = ["bin/nvcc", "include/cuda_runtime.h", "lib64/libcudart.so"]
PLACES = "lib64, lib, lib/*-linux-gnu, targets/*/lib"


def make_toolkit(home: Path, files: list[str], nvcc: str = "echo release 13.0, V1") -> str:
    for name in files:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(f"#!/bin/sh\n{nvcc}\n")
        (home / name).chmod(0o755)
    return str(home)


@pytest.mark.parametrize(
    ("include", "library"),
    [
        ("include", "lib64"),
        ("include", "lib/x86_64-linux-gnu"),
        ("targets/x86_64-linux/include", "targets/x86_64-linux/lib"),
    ],
)
def test_a_whole_toolkit_is_found(tmp_path: Path, include: str, library: str) -> None:
    files = ["bin/nvcc", f"{include}/cuda_runtime.h", f"{library}/libcudart.so"]
    found = toolkit.examine(make_toolkit(tmp_path, files), "13.2")
    assert found == (tmp_path / include, tmp_path / library, "")
    assert [toolkit.is_wanted(choice, found.missing) for choice in ("", "1", "0")] == [1, 1, 0]


@pytest.mark.parametrize(
    ("files", "nvcc", "missing"),
    [
        (WHOLE[1:], "", "no CUDA toolkit: CUDA_HOME={} has no nvcc in bin"),
        # The linker does not find the name with a version.
        ([*WHOLE[:2], "lib/libcudart.so.13"], "", f"no libcudart.so in {PLACES}"),
        (WHOLE[:1], "", "no cuda_runtime.h in include, targets/*/include; no libcudart.so in"),
        (
            WHOLE,
            "echo release 12.4, V1",
            "{}/bin/nvcc is from CUDA 12.4, the installed torch from 13",
        ),
        (WHOLE, "exit 3", "{}/bin/nvcc does not run: "),
    ],
)
def test_what_is_missing_is_named(
    tmp_path: Path, files: list[str], nvcc: str, missing: str
) -> None:
    found = toolkit.examine(make_toolkit(tmp_path, files, nvcc), "13.0").missing
    assert missing.format(tmp_path) in found
    assert toolkit.describe("", found, []) == f"CPU only ({found})"


def test_without_cuda_in_torch_or_without_a_toolkit() -> None:
    assert toolkit.examine("/usr", None).missing == "the installed torch has no CUDA"
    assert "CUDA_HOME is unset" in toolkit.examine(None, "13.0").missing
    assert toolkit.describe("0", "", []) == "CPU only (POWERSGD_BUILD_CUDA=0)"
    with pytest.raises(SystemExit, match="POWERSGD_BUILD_CUDA is 'yes'; allowed are 0, 1 and"):
        toolkit.is_wanted("yes", "")


def test_cuda_on_demand_fails_at_once_and_says_what_is_missing(tmp_path: Path) -> None:
    environment = {**os.environ, "POWERSGD_BUILD_CUDA": "1", "CUDA_HOME": str(tmp_path)}
    command = [sys.executable, "setup.py", "build_ext", f"--build-temp={tmp_path}/objects"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 1
    assert "\nPOWERSGD_BUILD_CUDA=1, but " in f"\n{result.stderr}"
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def setup_py(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """setup.py as a module, with a toolkit that lacks nothing."""
    specification = importlib.util.spec_from_file_location("powersgd_setup", ROOT / "setup.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    monkeypatch.setattr(module, "CUDA", toolkit.Toolkit())
    monkeypatch.setattr(module, "CUDA_CHOICE", "")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")
    return module


@pytest.mark.parametrize(
    ("release", "expected"),
    [
        ("12.6", "7.5;8.0;9.0+PTX"),
        ("12.8", "7.5;8.0;9.0;10.0;12.0+PTX"),
        ("14.1", "8.0;9.0;10.0;12.0+PTX"),
    ],
)
def test_the_architectures_of_a_build_without_a_gpu(release: str, expected: str) -> None:
    assert toolkit.default_architectures(release) == expected


def test_a_failure_ends_with_a_hint_if_cuda_was_built(
    setup_py: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(self: object) -> None:
        raise RuntimeError("command 'g++' failed")

    monkeypatch.setattr(setup_py.cpp_extension.BuildExtension, "run", fails)
    with pytest.raises(SystemExit, match="command 'g\\+\\+' failed\n.*POWERSGD_BUILD_CUDA=0"):
        setup_py.Build(Distribution()).run()
    assert "CUDA for sm_80, sm_90, PTX of compute_90\n" in capsys.readouterr().out
    monkeypatch.setattr(setup_py, "CUDA_CHOICE", "0")
    with pytest.raises(RuntimeError, match="^command 'g\\+\\+' failed$"):
        setup_py.Build(Distribution()).run()


def test_an_editable_build_keeps_its_objects(
    setup_py: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The objects lie where `build_ext --inplace` puts them, so that pip compiles nothing again."""
    monkeypatch.setattr(setup_py, "CUDA_CHOICE", "0")
    monkeypatch.setattr(setup_py.cpp_extension.BuildExtension, "run", lambda self: None)
    inplace, editable = (setup_py.Build(Distribution()) for _ in range(2))
    inplace.initialize_options()
    inplace.inplace = True
    inplace.finalize_options()
    editable.editable_mode = True
    editable.run()
    assert editable.build_temp == str(ROOT / inplace.build_temp)


def test_progress_is_short_lines_of_child_processes(capfd: pytest.CaptureFixture[str]) -> None:
    said = [
        "[3/45] g++ -MMD -c -c /r/csrc/core/a.cpp -o /t/a.o -O3",
        "[4/45] /c/nvcc '-I/a b' -c '/r/a b/c.cu' -o '/t/a b/c.o' -O3",
        "/r/csrc/core/a.cpp:3:1: warning: unused",
    ]
    with progress.short_commands(Path("/r")):
        subprocess.run(["echo", "\n".join(said)])
    shown = ["[3/45] csrc/core/a.cpp", "[4/45] a b/c.cu", said[2]]
    assert capfd.readouterr().out.splitlines() == shown


def test_the_sources_of_a_folder_are_compiled_together(tmp_path: Path) -> None:
    sources = ["csrc/core/plan.cpp", "csrc/engine/work.cpp", "csrc/engine/engine.cpp"]
    made = together.compiled_together(sources, ["engine"], tmp_path, {"engine": "// head\n"})
    file = tmp_path / "engine.cpp"
    assert made == ["csrc/core/plan.cpp", str(file)]
    text = '// head\n#include "engine/work.cpp"\n#include "engine/engine.cpp"\n'
    assert file.read_text() == text
    os.utime(file, (1, 1))
    together.compiled_together(sources, ["engine"], tmp_path, {"engine": "// head\n"})
    assert file.stat().st_mtime == 1, "ninja would compile it again"


def test_the_hash_of_the_kernels_is_that_of_their_contents(tmp_path: Path) -> None:
    files = ["csrc/kernels/cuda/a.cu", "include/powersgd/kernels/packets.h"]
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    found = {together.hash_of_kernels(tmp_path)}
    for file in files:
        (tmp_path / file).write_text(file)
        found.add(together.hash_of_kernels(tmp_path))
    assert len(found) == 1 + len(files)


# Streams of the archive's copy crash in a process that has torch's. A machine whose compiler finds
# the archive alone links it as -static-libstdc++ does.
def test_libstdcxx_is_shared_where_the_compiler_would_link_its_archive(
    setup_py: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(setup_py, "CUDA_CHOICE", "0")
    source, library = tmp_path / "prints.cpp", tmp_path / "prints.so"
    source.write_text("#include <iostream>\nvoid print(long value) { std::cout << value; }\n")
    flags = setup_py.extension(setup_py.CUDA).extra_link_args
    command = ["g++", "-shared", "-fPIC", str(source), *flags, "-static-libstdc++", "-o", library]
    subprocess.run(command, check=True)
    assert b"libstdc++.so.6\0" in library.read_bytes()
    assert library.stat().st_size < 100_000  # the archive's streams alone are larger
