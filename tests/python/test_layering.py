# SPDX-License-Identifier: BSD-3-Clause
"""Each layer sees only those before it: plan, kernels, compressor, backend, bindings, python."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE_SUFFIXES = {".h", ".cpp", ".cu", ".cuh", ".py", ".pyi"}
STAGES = ["project", "orthogonalize", "back_project", "reconstruct", "project_transposed"]

# The first pattern that a file's path matches names its layer.
LAYERS = {
    "options": r"include/powersgd/options\.h",
    "plan": r"include/powersgd/plan\.h|csrc/plan/",
    "kernels": r"include/powersgd/kernels\.h|csrc/kernels/[^/]+$",
    "cpu kernels": r"csrc/kernels/cpu/",
    "cuda kernels": r"csrc/kernels/cuda/",
    "compressor": r"include/powersgd/compressor\.h|csrc/compressor/",
    "backend": r"include/powersgd/backend\.h|csrc/backend/",
    "bindings": r"csrc/bindings/",
}

# The layers of this project that a layer may include, itself apart.
MAY_INCLUDE = {
    "options": [],
    "plan": ["options"],
    "kernels": ["options"],
    "cpu kernels": ["options", "kernels"],
    "cuda kernels": ["options", "kernels"],
    "compressor": ["options", "plan", "kernels"],
    "backend": ["options", "plan", "compressor"],
    "bindings": ["options", "plan", "compressor", "backend"],
}

# What else a layer may include. A header of the C++ library has neither a slash nor a suffix.
STANDARD = r"[a-z_0-9]+"
INTRINSICS = r"(immintrin|arm_neon)\.h"
CUDA_RUNTIME = r"(cuda_runtime|cuda_runtime_api|cuda_bf16|cuda_fp16)\.h|cooperative_groups.*|mma\.h"
ATEN = r"(ATen|c10)/(?!cuda/).*"  # the same host source builds against a torch without CUDA
TORCH = r"torch/csrc/(autograd|distributed/c10d)/(?!.*(NCCL|Gloo|UCC|MPI|pybind|python)).*"
MAY_INCLUDE_ELSE = {
    "options": STANDARD,
    "plan": STANDARD,
    "kernels": STANDARD,
    "cpu kernels": f"{STANDARD}|{INTRINSICS}",
    "cuda kernels": f"{STANDARD}|{CUDA_RUNTIME}",
    "compressor": f"{STANDARD}|{ATEN}",
    "backend": rf"{STANDARD}|{ATEN}|{TORCH}|torch/version\.h",
    "bindings": r".*",
}

INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)

# Python hands tensors on; what computes with them is C++.
MATHS = re.compile(r"(numpy|scipy|torch\.(linalg|fft|special|nn\.functional))(\.|$)")


def files_under(root: Path, *folders: str) -> list[Path]:
    found = [f for folder in folders for f in (root / folder).rglob("*")]
    return sorted(f for f in found if f.suffix in SOURCE_SUFFIXES)


def layer_of(path: str) -> str:
    for layer, pattern in LAYERS.items():
        if re.match(pattern, path):
            return layer
    raise AssertionError(f"{path} belongs to no layer: add it to LAYERS")


def resolve(include: str, file: Path, root: Path) -> str | None:
    """The file of this project that an include names, relative to its root; None if not ours."""
    for folder in (file.parent, root / "csrc", root / "include"):
        path = (folder / include).resolve()
        if path.is_file() and path.is_relative_to(root):
            return path.relative_to(root).as_posix()
    return None


def wrong_includes(root: Path) -> list[str]:
    wrong = []
    for file in files_under(root, "csrc", "include"):
        name = file.relative_to(root).as_posix()
        layer = layer_of(name)
        for include in INCLUDE.findall(file.read_text()):
            target = resolve(include, file, root)
            if target is None:
                allowed = re.fullmatch(MAY_INCLUDE_ELSE[layer], include) is not None
            else:
                allowed = layer_of(target) in [layer, *MAY_INCLUDE[layer]]
            if not allowed:
                wrong.append(f"{name} ({layer}) must not include {include}")
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
            if MATHS.match(imported):
                wrong.append(f"{name} must not import {imported}")
    return wrong


def test_includes_follow_the_layers() -> None:
    assert wrong_includes(ROOT) == []


def test_imports_follow_the_layers() -> None:
    assert wrong_imports(ROOT) == []


@pytest.mark.parametrize(
    ("path", "include"),
    [
        ("csrc/plan/plan.cpp", "<ATen/ATen.h>"),
        ("csrc/plan/plan.cpp", '"powersgd/kernels.h"'),
        ("csrc/kernels/shared.h", '"cpu/simd.h"'),
        ("csrc/kernels/cpu/project.cpp", '"powersgd/plan.h"'),
        ("csrc/kernels/cpu/project.cpp", '"../cuda/launch.cuh"'),
        ("csrc/kernels/cuda/project.cu", "<c10/cuda/CUDAStream.h>"),
        ("csrc/compressor/state.cpp", "<torch/csrc/distributed/c10d/Work.hpp>"),
        ("csrc/compressor/state.cpp", "<c10/cuda/CUDAGuard.h>"),
        ("csrc/backend/work.cpp", "<pybind11/pybind11.h>"),
        ("csrc/backend/work.cpp", "<torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>"),
        ("csrc/backend/work.cpp", '"powersgd/kernels.h"'),
        ("csrc/backend/work.cpp", '"bindings/gil.h"'),
    ],
)
def test_a_wrong_include_is_found(tmp_path: Path, path: str, include: str) -> None:
    headers = ["powersgd/plan.h", "powersgd/kernels.h"]
    local = ["csrc/kernels/cpu/simd.h", "csrc/kernels/cuda/launch.cuh", "csrc/bindings/gil.h"]
    for header in [*(f"include/{h}" for h in headers), *local]:
        (tmp_path / header).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / header).touch()
    source = tmp_path / path
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text(f"#include <vector>\n#include {include}\n")
    assert len(wrong_includes(tmp_path)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import numpy as np",
        "from torch.nn import functional",
        "from torch_powersgd import _C",
        "from torch_powersgd._C import Options",
        "from . import _C",
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, source: str) -> None:
    file = tmp_path / "python" / "torch_powersgd" / "stats.py"
    file.parent.mkdir(parents=True)
    file.write_text(f"import torch\n{source}\n")
    assert wrong_imports(tmp_path) != []


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_has_one_basename_everywhere(stage: str) -> None:
    assert (ROOT / "csrc/kernels/cpu" / f"{stage}.cpp").is_file()
    assert (ROOT / "tests/cpp/kernels" / f"test_{stage}.cpp").is_file()
    cuda = ROOT / "csrc/kernels/cuda"
    if any(cuda.glob("*.cu")):
        assert (cuda / f"{stage}.cu").is_file()


def test_every_source_file_names_its_licence() -> None:
    folders = ["csrc", "include", "python", "setup_support", "tests", "examples", "benchmarks"]
    missing = []
    for file in [ROOT / "setup.py", *files_under(ROOT, *folders)]:
        first_lines = file.read_text().splitlines()[:2]  # the second, after a #! line
        if not any(line.endswith("SPDX-License-Identifier: BSD-3-Clause") for line in first_lines):
            missing.append(file.relative_to(ROOT).as_posix())
    assert missing == []
