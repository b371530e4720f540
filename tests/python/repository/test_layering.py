# SPDX-License-Identifier: BSD-3-Clause
"""A folder includes and imports only what lies below it; docs/architecture.md draws the layers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from support.repository import ROOT

SOURCE_SUFFIXES = {".h", ".inl", ".cpp", ".cu", ".cuh", ".py", ".pyi"}
STAGES = ["project", "orthogonalize", "back_project", "reconstruct"]

# Other headers than this project's. One of the C++ library has neither a slash nor a suffix.
STANDARD = r"[a-z_0-9]+"
INTRINSICS = rf"{STANDARD}|(immintrin|arm_neon)\.h"
CUDA = rf"{STANDARD}|cuda_[a-z_0-9]+\.h|cooperative_groups.*|mma\.h"
ATEN = rf"{STANDARD}|(ATen|c10)/(?!cuda/).*"  # the same source builds against a torch without CUDA
C10D = (
    rf"{ATEN}|torch/version\.h"
    r"|torch/csrc/(autograd|distributed/c10d)/(?!.*(NCCL|Gloo|UCC|MPI|pybind|python)).*"
)

# The folders of csrc and include/powersgd from the lowest up: what each includes beside what lies
# below it. Those of STAND_ALONE include nothing else of this project, but for core in the engine.
FOLDERS = {
    "core": STANDARD,
    "kernels": STANDARD,
    "kernels/shared": STANDARD,
    "kernels/cpu/simd": INTRINSICS,
    "kernels/cpu/blocking": STANDARD,
    "kernels/cpu": INTRINSICS,
    "kernels/cuda": CUDA,
    "compressor": ATEN,
    "engine": C10D,
    "group": C10D,
    "model": C10D,
    "bindings": r".*",
}
STAND_ALONE = {"core", "kernels/cpu/simd", "engine"}
CLOSED = ("kernels/", "kernels/cpu", "kernels/cuda")  # what only files within include

INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)

# Python passes tensors on; C++ computes with them.
COMPUTING = re.compile(r"(numpy|scipy|torch\.(linalg|fft|special|nn\.functional))(\.|$)")

# The commands stand on the library, which imports none of them, nor their own requirements.
COMMANDS = re.compile(r"torch_powersgd\.cli(\.|$)|rich(\.|$)")

PRIVATE = re.compile(r"_[a-z]")
TORCHS = {"_timeout", "_fragments"}  # torch and torchft have these as well


def files_under(root: Path, *folders: str) -> list[Path]:
    found = [f for folder in folders for f in (root / folder).rglob("*")]
    return sorted(f for f in found if f.suffix in SOURCE_SUFFIXES)


def folder_of(path: str) -> str:
    """The folder of FOLDERS that holds a file of csrc or include/powersgd."""
    inside = re.sub(r"^(csrc|include/powersgd)/", "", path)
    return max((f for f in FOLDERS if inside.startswith(f"{f}/")), key=len)


def resolve(include: str, file: Path, root: Path) -> str | None:
    """The file of this project that an include names, relative to its root; None if not ours."""
    for folder in (file.parent, root / "csrc", root / "include"):
        path = (folder / include).resolve()
        if path.is_file() and path.is_relative_to(root):
            return path.relative_to(root).as_posix()
    return None


def may_include(file: str, target: str) -> bool:
    own, other = folder_of(file), folder_of(target)
    if file.startswith("include/") and not target.startswith("include/"):
        return False
    if own == "bindings" and other != own and not target.startswith("include/"):
        return False
    if own == other:
        return True
    order = list(FOLDERS)
    if own in STAND_ALONE:
        return (own, other) == ("engine", "core")
    closed = any(other.startswith(c) and not own.startswith(c) for c in CLOSED)
    return order.index(other) < order.index(own) and not closed


def wrong_includes(root: Path) -> list[str]:
    wrong = []
    for file in files_under(root, "csrc", "include"):
        name = file.relative_to(root).as_posix()
        for include in INCLUDE.findall(file.read_text()):
            target = resolve(include, file, root)
            allowed = (
                may_include(name, target)
                if target
                else re.fullmatch(FOLDERS[folder_of(name)], include)
            )
            if not allowed:
                wrong.append(f"{name} must not include {include}")
    return wrong


def imports(source: str) -> list[str]:
    """Every module that Python code imports, and every name that it takes from one."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names += [module, *(f"{module}.{alias.name}" for alias in node.names)]
    return names


def wrong_imports(root: Path) -> list[str]:
    wrong = []
    for file in files_under(root, "python"):
        name = file.relative_to(root).as_posix()
        for imported in imports(file.read_text()):
            compiled = re.fullmatch(r"(torch_powersgd)?\.+_C(\..*)?", imported)
            if compiled and file.name != "_core.py":
                wrong.append(
                    f"{name}: only _core.py imports _C, once it has checked torch's version"
                )
            if COMMANDS.match(imported) and "cli" not in file.parts and file.name != "__main__.py":
                wrong.append(f"{name}: only the command line imports {imported}")
            if COMPUTING.match(imported):
                wrong.append(f"{name} must not import {imported}")
    return wrong


def import_circle(root: Path) -> list[str]:
    """The modules of one circle of imports, those inside functions included; empty if none."""
    package = "torch_powersgd"
    files = {
        ".".join(file.relative_to(root / "python").with_suffix("").parts): file
        for file in files_under(root, f"python/{package}")
    }
    # A module that takes a name from the package imports that name's module, not __init__.py.
    imported = {
        name: set(imports(file.read_text())) & (files.keys() - {name})
        for name, file in files.items()
    }
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def private_uses(root: Path) -> list[str]:
    """The uses of private names that only other modules of the package define."""
    files = [file for file in files_under(root, "python") if file.suffix == ".py"]
    nodes = {file: [*ast.walk(ast.parse(file.read_text()))] for file in files}
    own = {file: set(filter(PRIVATE.match, _defined(nodes[file]))) for file in files}
    ours = set().union(*own.values()) - TORCHS
    return [
        f"{file.relative_to(root)}:{node.lineno} uses {name}"
        for file in files
        for node, name in _taken(nodes[file])
        if name in ours - own[file]
    ]


def _defined(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr if ast.unparse(node.value) == "self" else ""


def _taken(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.Attribute | ast.ImportFrom, str]]:
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "super()"):
            yield node, node.attr


def test_includes_follow_the_layers() -> None:
    assert wrong_includes(ROOT) == []


def test_imports_follow_the_layers() -> None:
    assert wrong_imports(ROOT) == []


def test_no_module_uses_the_private_names_of_another() -> None:
    assert private_uses(ROOT) == []


def test_no_imports_run_in_a_circle() -> None:
    assert import_circle(ROOT) == []


@pytest.mark.parametrize(
    ("path", "include"),
    [
        ("csrc/core/plan.cpp", "<ATen/ATen.h>"),
        ("csrc/core/plan.cpp", '"powersgd/kernels/kernels.h"'),
        ("csrc/kernels/cpu/blocking/tiles.h", "<immintrin.h>"),
        ("csrc/kernels/cpu/project.inl", '"kernels/cuda/launch.cuh"'),
        ("csrc/kernels/cuda/project.cu", '"kernels/cpu/form_m.h"'),
        ("csrc/kernels/cuda/project.cu", "<c10/cuda/CUDAStream.h>"),
        ("csrc/compressor/device_stages.cpp", "<torch/csrc/distributed/c10d/Work.hpp>"),
        ("csrc/engine/work.cpp", '"powersgd/kernels/kernels.h"'),
        ("csrc/group/session.cpp", '"kernels/cuda/launch.cuh"'),
        ("csrc/engine/work.cpp", "<torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>"),
        ("csrc/bindings/module.cpp", '"engine/engine.h"'),
        ("include/powersgd/group/session.h", '"engine/engine.h"'),
    ],
)
def test_a_wrong_include_is_found(tmp_path: Path, path: str, include: str) -> None:
    kernels = ("csrc/kernels/cuda/launch.cuh", "csrc/kernels/cpu/form_m.h")
    for file in [*kernels, "csrc/engine/engine.h", "include/powersgd/kernels/kernels.h", path]:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    (tmp_path / path).write_text(f"#include <vector>\n#include {include}\n")
    assert len(wrong_includes(tmp_path)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import numpy as np",
        "from torch.nn import functional",
        "from torch_powersgd import _C",
        "from . import _C",
        "from torch_powersgd import cli",
        "from torch_powersgd.cli.footprint import footprint_of",
        "import rich.table",
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, source: str) -> None:
    file = tmp_path / "python" / "torch_powersgd" / "stats.py"
    file.parent.mkdir(parents=True)
    file.write_text(f"import torch\n{source}\n")
    assert wrong_imports(tmp_path) != []


def test_a_private_use_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "python"
    folder.mkdir()
    (folder / "one.py").write_text("def _f(): pass\nclass C:\n    def _g(self): self._h = _f()\n")
    (folder / "two.py").write_text("from one import _f\n\nc._g()\nc._h = c._of_torch\n")
    uses = sorted(use.partition(":")[2] for use in private_uses(tmp_path))
    assert uses == ["1 uses _f", "3 uses _g", "4 uses _h"]


def test_a_circle_of_imports_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "python" / "torch_powersgd"
    folder.mkdir(parents=True)
    (folder / "stats.py").write_text("from torch_powersgd import log\n")
    (folder / "log.py").write_text("def f():\n    from torch_powersgd.stats import x\n")
    assert {"torch_powersgd.stats", "torch_powersgd.log"} == set(import_circle(tmp_path))


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_has_one_basename_everywhere(stage: str) -> None:
    assert (ROOT / "csrc/kernels/cpu" / f"{stage}.inl").is_file()
    assert (ROOT / "tests/cpp/kernels" / f"test_{stage}.cpp").is_file()
    cuda = ROOT / "csrc/kernels/cuda"
    if any(cuda.glob("*.cu")):
        assert (cuda / f"{stage}.cu").is_file()


def test_every_source_file_names_its_license() -> None:
    folders = ["csrc", "include", "python", "setup_support", "tests", "examples", "benchmarks"]
    missing = []
    for file in [ROOT / "setup.py", *files_under(ROOT, *folders)]:
        first_lines = file.read_text().splitlines()[:2]  # the second, after a #! line
        if not any(line.endswith("SPDX-License-Identifier: BSD-3-Clause") for line in first_lines):
            missing.append(file.relative_to(ROOT).as_posix())
    assert missing == []
