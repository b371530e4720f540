# SPDX-License-Identifier: BSD-3-Clause
"""Checks the CUDA toolkit before anything is compiled."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

# The linker needs the name without a version, which wheels of the CUDA runtime lack.
PARTS = {
    "nvcc": ("bin",),
    "cuda_runtime.h": ("include", "targets/*/include"),
    "libcudart.so": ("lib64", "lib", "lib/*-linux-gnu", "targets/*/lib"),
}


class Toolkit(NamedTuple):
    """The folders of a CUDA toolkit that a build needs, or a phrase that says what is missing."""

    include: Path = Path()
    lib: Path = Path()
    missing: str = ""


def examine(home: str | None, torch_cuda: str | None) -> Toolkit:
    """Checks the toolkit in the folder `home` for a torch of the CUDA release `torch_cuda`."""
    if torch_cuda is None:
        return Toolkit(missing="the installed torch has no CUDA")
    if home is None:
        return Toolkit(
            missing="no CUDA toolkit: CUDA_HOME is unset, nvcc is not on PATH, "
            "no folder /usr/local/cuda"
        )
    found: dict[str, Path] = {}
    absent = []
    for name, folders in PARTS.items():
        files = [file for folder in folders for file in sorted(Path(home).glob(f"{folder}/{name}"))]
        if files:
            found[name] = files[0].parent
        else:
            absent.append(f"no {name} in {', '.join(folders)}")
    if absent:
        return Toolkit(missing=f"no CUDA toolkit: CUDA_HOME={home} has {'; '.join(absent)}")
    wrong = _wrong_release(found["nvcc"] / "nvcc", torch_cuda)
    return Toolkit(found["cuda_runtime.h"], found["libcudart.so"], wrong)


def _wrong_release(nvcc: Path, torch_cuda: str) -> str:
    """torch refuses to build with a major release of CUDA other than its own."""
    try:
        output = subprocess.check_output([nvcc, "--version"], text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{nvcc} does not run: {error}"
    release = re.search(r"release (\d+)\.(\d+)", output)
    if release is None or release[1] == torch_cuda.split(".")[0]:
        return ""
    return f"{nvcc} is from CUDA {release[1]}.{release[2]}, the installed torch from {torch_cuda}"


def is_wanted(choice: str, missing: str) -> bool:
    """Whether to build CUDA: as `choice` (POWERSGD_BUILD_CUDA) says, else if nothing is missing."""
    if choice not in ("", "0", "1"):
        raise SystemExit(f"POWERSGD_BUILD_CUDA is {choice!r}; allowed are 0, 1 and unset")
    if choice == "1" and missing:
        raise SystemExit(
            f"POWERSGD_BUILD_CUDA=1, but {missing}. "
            "Set CUDA_HOME to a CUDA toolkit, or POWERSGD_BUILD_CUDA=0 to build without."
        )
    return choice != "0" and not missing


def default_architectures(torch_cuda: str) -> str:
    """The architectures to compile for if no GPU is visible, as in TORCH_CUDA_ARCH_LIST.

    Slow networks often connect GPUs such as a T4 (7.5) or an RTX 50 (12.0), which cannot run code
    for datacenter GPUs (8.0, 9.0, 10.0).
    """
    release = tuple(int(part) for part in re.findall(r"\d+", torch_cuda)[:2])
    oldest = [] if release >= (14,) else ["7.5"]
    newest = ["10.0", "12.0"] if release >= (12, 8) else []
    return ";".join([*oldest, "8.0", "9.0", *newest]) + "+PTX"


def architectures(nvcc_flags: list[str]) -> list[str]:
    """The targets of the -gencode flags, such as sm_90, or compute_120 for PTX."""
    codes = set(re.findall(r",code=((?:sm|compute)_(\d+)\w*)", " ".join(nvcc_flags)))
    ordered = sorted(codes, key=lambda code: (code[0].startswith("compute_"), int(code[1])))
    return [code for code, _ in ordered]


def describe(choice: str, missing: str, nvcc_flags: list[str]) -> str:
    """One line that says what is built. For CUDA, `nvcc_flags` has -gencode=arch=..,code=.."""
    if is_wanted(choice, missing):
        names = [c.replace("compute_", "PTX of compute_") for c in architectures(nvcc_flags)]
        return f"CUDA for {', '.join(names)}"
    reason = "POWERSGD_BUILD_CUDA=0" if choice == "0" else missing
    return f"CPU only ({reason})"


def failure_hint(home: str | None) -> str:
    return (
        f"The build with the CUDA toolkit in {home} failed; see the error above. "
        "Set POWERSGD_BUILD_CUDA=0 to build for CPUs only, CUDA_HOME=<folder> for another toolkit."
    )
