# SPDX-License-Identifier: BSD-3-Clause
"""Checks the CUDA toolkit before anything is compiled."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

INCLUDE_FOLDERS = ("include", "targets/*/include")
LIBRARY_FOLDERS = ("lib64", "lib", "lib/*-linux-gnu", "targets/*/lib")


@dataclass
class Toolkit:
    """The parts of a CUDA toolkit that a build needs, and a phrase for each that is missing."""

    include: Path | None = None
    lib: Path | None = None
    missing: list[str] = field(default_factory=list)


def examine(home: str | None, torch_cuda: str | None) -> Toolkit:
    """Checks the toolkit in the folder `home` for a torch built with the CUDA release `torch_cuda`.

    The linker needs libcudart.so, the name without a version: wheels of the CUDA runtime lack it.
    """
    toolkit = Toolkit()
    if torch_cuda is None:
        toolkit.missing.append("the installed torch has no CUDA")
    elif home is None:
        toolkit.missing.append(
            "no CUDA toolkit: CUDA_HOME is unset, nvcc is not on PATH, no folder /usr/local/cuda"
        )
    else:
        _examine_folder(toolkit, Path(home), torch_cuda)
    return toolkit


def _examine_folder(toolkit: Toolkit, home: Path, torch_cuda: str) -> None:
    nvcc = _find(home, "nvcc", ("bin",))
    toolkit.include = _find(home, "cuda_runtime.h", INCLUDE_FOLDERS)
    toolkit.lib = _find(home, "libcudart.so", LIBRARY_FOLDERS)
    parts = {
        "nvcc": (nvcc, ("bin",)),
        "cuda_runtime.h": (toolkit.include, INCLUDE_FOLDERS),
        "libcudart.so": (toolkit.lib, LIBRARY_FOLDERS),
    }
    absent = [
        f"no {name} in {', '.join(folders)}"
        for name, (folder, folders) in parts.items()
        if folder is None
    ]
    if absent:
        toolkit.missing.append(f"no CUDA toolkit: CUDA_HOME={home} has {'; '.join(absent)}")
    elif nvcc is not None:
        toolkit.missing += _wrong_release(nvcc / "nvcc", torch_cuda)


def _find(home: Path, name: str, folders: tuple[str, ...]) -> Path | None:
    """The path of this file in the first of these folders of `home` that has it."""
    found = (path.parent for pattern in folders for path in sorted(home.glob(f"{pattern}/{name}")))
    return next(found, None)


def _wrong_release(nvcc: Path, torch_cuda: str) -> list[str]:
    """torch refuses to build with a major release of CUDA other than its own."""
    try:
        output = subprocess.run(
            [nvcc, "--version"], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return [f"{nvcc} does not run: {error}"]
    release = re.search(r"release (\d+)\.(\d+)", output)
    if release is None or release[1] == torch_cuda.split(".")[0]:
        return []
    return [f"{nvcc} is from CUDA {release[1]}.{release[2]}, the installed torch from {torch_cuda}"]


def is_wanted(choice: str, missing: list[str]) -> bool:
    """Whether to build CUDA: as `choice` (POWERSGD_BUILD_CUDA) says, else if nothing is missing."""
    if choice not in ("", "0", "1"):
        raise SystemExit(f"POWERSGD_BUILD_CUDA is {choice!r}; allowed are 0, 1 and unset")
    if choice == "1" and missing:
        raise SystemExit(
            f"POWERSGD_BUILD_CUDA=1, but {'; '.join(missing)}. "
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


def describe(choice: str, missing: list[str], nvcc_flags: list[str]) -> str:
    """One line that says what is built. For CUDA, `nvcc_flags` has -gencode=arch=..,code=.."""
    if is_wanted(choice, missing):
        names = [c.replace("compute_", "PTX of compute_") for c in architectures(nvcc_flags)]
        return f"CUDA for {', '.join(names)}"
    reason = "POWERSGD_BUILD_CUDA=0" if choice == "0" else "; ".join(missing)
    return f"CPU only ({reason})"


def failure_hint(home: str | None) -> str:
    return (
        f"The build with the CUDA toolkit in {home} failed; see the error above. "
        "Set POWERSGD_BUILD_CUDA=0 to build for CPUs only, CUDA_HOME=<folder> for another toolkit."
    )
