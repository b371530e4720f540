# SPDX-License-Identifier: BSD-3-Clause
"""The package as an index and pip read it: metadata, the long description, the sdist's files."""

from __future__ import annotations

import email
import email.message
import importlib.metadata
import re
import subprocess
import sys
import tarfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import torch_powersgd as tp
import torch_powersgd.__main__
from setup_support import metadata
from support.deadline import DEADLOCK
from support.repository import ROOT
from torch_powersgd._core import _C
from torch_powersgd.integrations.libraries import TESTED

REPOSITORY = metadata.repository(ROOT / "pyproject.toml")
VERSION = tp.__version__
TORCH = torch.__version__.split("+")[0]


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """The files of this checkout, with the new ones."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this is not a checkout of git")
    return [name for name in result.stdout.splitlines() if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def copy(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, in which a build may write, with files that an earlier build left."""
    folder = tmp_path_factory.mktemp("copy")
    left_behind = ["python/torch_powersgd/_C.x.so", "tests/python/__pycache__/x.pyc", "build/x.cpp"]
    for name in [*tracked, *left_behind]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes() if name in tracked else b"")
    return folder


def run_setup(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "setup.py", "--quiet", *arguments]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=DEADLOCK)
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


@pytest.fixture(scope="module")
def sdist(copy: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("dist")
    said = run_setup(copy, "sdist", f"--dist-dir={folder}")
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder)
    (unpacked,) = (entry for entry in folder.iterdir() if entry.is_dir())
    return unpacked, said


def read_metadata(file: Path) -> email.message.Message:
    return email.message_from_string(file.read_text(encoding="utf-8"))


def own_requirements(message: email.message.Message) -> list[str]:
    """The requirements without an extra."""
    return sorted(value for value in message.get_all("Requires-Dist", []) if ";" not in value)


def test_the_sdist_is_complete_and_takes_any_supported_torch(
    sdist: tuple[Path, str], tracked: list[str]
) -> None:
    unpacked, said = sdist
    assert [line for line in said.splitlines() if "CUDA runtime is found" not in line] == []
    present = {str(file.relative_to(unpacked)) for file in unpacked.rglob("*") if file.is_file()}
    assert sorted(set(tracked) - present) == []
    made = {name for name in present - set(tracked) if ".egg-info/" not in name}
    assert made <= {"PKG-INFO", "setup.cfg"}
    message = read_metadata(unpacked / "PKG-INFO")
    assert own_requirements(message) == [f"torch>={metadata.OLDEST_TORCH}"]
    assert message["Version"] == VERSION
    assert "requires-dist" in message.get_all("Dynamic", [])


def test_a_wheel_takes_the_torch_that_it_was_built_with(
    sdist: tuple[Path, str], tmp_path: Path
) -> None:
    """This also builds the metadata from the sdist."""
    unpacked, _ = sdist
    run_setup(unpacked, "dist_info", f"--output-dir={tmp_path}")
    (file,) = tmp_path.glob("*.dist-info/METADATA")
    message = read_metadata(file)
    # The import compares the same part of the version.
    assert own_requirements(message) == [f"torch=={_C.torch_version}"] == [f"torch=={TORCH}"]
    assert re.fullmatch(rf"{VERSION}\+torch{re.escape(TORCH)}\.(cpu|cu\d+)", message["Version"])
    assert f"Repository, {REPOSITORY}" in message.get_all("Project-URL", [])
    assert message["Description-Content-Type"] == "text/markdown"
    extras = {"bench", "demo", "lint", "rich", "test", "test-long", "test-torchtitan"}
    assert set(message.get_all("Provides-Extra", [])) == extras
    assert relative_targets(str(message.get_payload())) == []
    scripts = importlib.metadata.PathDistribution(file.parent).entry_points
    (command,) = scripts.select(group="console_scripts")
    assert (command.name, command.load()) == ("powersgd", torch_powersgd.__main__.main)


def test_a_wheel_with_kernels_for_gpus_names_their_cuda() -> None:
    assert metadata.local_version("2.15.0+cu130", "13.0") == "+torch2.15.0.cu130"


@pytest.mark.long
def test_a_wheel_is_imported_where_there_is_no_compiler(
    sdist: tuple[Path, str], tmp_path: Path
) -> None:
    """The wheel is built from the sdist, and installed in a folder of its own."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    flags = ["--no-build-isolation", "--no-deps"]
    wheels, installed = tmp_path / "wheels", tmp_path / "installed"
    subprocess.run([*pip, "wheel", *flags, f"--wheel-dir={wheels}", sdist[0]], check=True)
    (wheel,) = wheels.iterdir()
    assert re.match(rf"torch_powersgd-{VERSION}\+torch{re.escape(TORCH)}\.\w+-cp", wheel.name)
    subprocess.run([*pip, "install", "--no-deps", f"--target={installed}", wheel], check=True)
    ended = subprocess.run(
        [installed / "bin" / "powersgd", "doctor"],
        cwd=tmp_path,
        env={"PATH": "", "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert str(installed) in ended.stdout.replace("\n", "").replace(" ", "")


def _text(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def test_all_files_name_the_same_pythons() -> None:
    """CI builds and trains with the oldest and the newest, and a release with each."""
    project, install = _text("pyproject.toml"), _text("docs/install.md")
    pythons = re.findall(r"Programming Language :: Python :: (3\.\d+)", project)
    oldest, newest = pythons[0], pythons[-1]
    assert f'requires-python = ">={oldest}"' in project
    assert f'python_version = "{oldest}"' in project  # of mypy
    assert f'target-version = "py{oldest.replace(".", "")}"' in project  # of ruff
    assert f"| Python | {', '.join(pythons)};" in install
    assert f"Python {oldest} to {newest}," in _text("README.md")
    torches = re.search(r"torch: \[(.*)\]", _text(".github/workflows/wheels.yml"))
    assert torches
    assert "| torch | {} |".format(torches[1].replace('"', "")) in install
    wheels = re.search(r"python: \[(.*)\]", _text(".github/workflows/wheels.yml"))
    assert wheels
    assert re.findall(r"3\.\d+", wheels[1]) == pythons
    tests = re.search(r"python-version: \|\s+([\d.\s]+)", _text(".github/workflows/ci.yml"))
    assert tests
    assert tests[1].split()[:2] == [oldest, newest]


def test_all_files_name_the_same_versions_of_other_libraries() -> None:
    extras = re.findall(r'"(\w+)(?:\[\w+\])?==([\d.]+)[;"]', _text("pyproject.toml"))
    named = {name: version for name, version in extras if name in TESTED}
    rows = dict(re.findall(r"^\| (\w+) \| ([\d.]+) \|$", _text("docs/install.md"), re.MULTILINE))
    assert named == rows == TESTED
    assert f"torchtitan {TESTED['torchtitan']} " in _text("docs/first-step-torchtitan.md")
    installed = {name: importlib.metadata.version(name) for name in TESTED if find_spec(name)}
    assert installed == {name: TESTED[name] for name in installed}


def relative_targets(markdown: str) -> list[str]:
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", markdown, flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"""\]\(([^)\s]+)|(?:src|href|srcset)=["']([^"']+)""", text)
    return [url for pair in targets for url in pair if url and not re.match(r"[a-z]+:", url)]


@pytest.mark.parametrize(
    "file", ["README.md", "pyproject.toml", ".github/ISSUE_TEMPLATE/config.yml"]
)
def test_links_to_the_repository_lead_to_files(file: str) -> None:
    text = metadata.absolute_links(_text(file), REPOSITORY)
    paths = re.findall(rf"{re.escape(REPOSITORY)}/(?:blob|raw|tree)/HEAD/([^)\"'\s#]+)", text)
    assert REPOSITORY in text
    assert relative_targets(text) == []
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    ("markdown", "absolute"),
    [
        ("[a](docs/a.md#b) [c](LICENSE)", "[a](U/blob/HEAD/docs/a.md#b) [c](U/blob/HEAD/LICENSE)"),
        ("[![a](a.png)](a.md)", "[![a](U/raw/HEAD/a.png)](U/blob/HEAD/a.md)"),
        ("[a](https://b.c/d)", "[a](https://b.c/d)"),
    ],
)
def test_relative_links_are_made_absolute(markdown: str, absolute: str) -> None:
    assert metadata.absolute_links(markdown, "U") == absolute
