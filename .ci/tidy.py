# SPDX-License-Identifier: BSD-3-Clause
"""Runs clang-tidy over csrc, with the checks of .clang-tidy.

    python .ci/tidy.py [JOBS]        default: 2 processes at a time

Most of the time goes to torch's headers, so the sources of a folder are checked as one file: no two
may use the same name for different things. A folder that has passed is checked again only after a
source, a header or a check changes.
"""

from __future__ import annotations

import hashlib
import platform
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch.utils.cpp_extension import include_paths

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

from setup_support.together import WITH_TORCH, include_all  # noqa: E402

BUILD = ROOT / "build" / "tidy"
WITHOUT_TORCH = ("core", "kernels")
FLAGS = [
    "-std=c++20",
    # clang does not know `#pragma GCC target`, so the intrinsics of every target are enabled here.
    *(["-march=x86-64-v4"] if platform.machine() == "x86_64" else []),
    *(f"-I{ROOT / folder}" for folder in ("include", "csrc")),
    *(f"-isystem{folder}" for folder in [*include_paths(), sysconfig.get_path("include")]),
    # The macros that setup.py and torch's build extension define.
    *(f'-DPOWERSGD_{name}="0"' for name in ("TORCH_VERSION", "KERNELS_VERSION")),
    *('-DPOWERSGD_CUDA_ARCHITECTURES=""', "-DTORCH_EXTENSION_NAME=_C"),
    *("-DUSE_C10D_GLOO=1", "-DUSE_DISTRIBUTED=1"),
]


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / "csrc" / folder).rglob("*.cpp"))


def fingerprint(files: list[Path]) -> str:
    """A digest of everything that a check depends on, except torch itself."""
    headers = [f for folder in ("include", "csrc") for f in (ROOT / folder).rglob("*.[hi]*")]
    digest = hashlib.sha256(repr(FLAGS).encode())
    for file in sorted([*files, *headers, ROOT / ".clang-tidy"]):
        digest.update(str(file).encode() + file.read_bytes())
    return digest.hexdigest()


def check(name: str, files: list[Path]) -> str:
    """Checks sources as one file. Returns the findings, or an empty string if there are none."""
    passed, together = BUILD / f"{name}.passed", BUILD / f"{name}.cpp"
    inputs = fingerprint(files)
    if passed.exists() and passed.read_text() == inputs:
        return ""
    include_all(together, (file.relative_to(ROOT).as_posix() for file in files))
    command = ["clang-tidy", "--quiet", str(together), "--", *FLAGS]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode:
        return ended.stdout.replace(f"{ROOT}/", "") or ended.stderr
    passed.write_text(inputs)
    return ""


def main(jobs: int) -> None:
    BUILD.mkdir(parents=True, exist_ok=True)
    groups = {folder: sources(folder) for folder in WITH_TORCH}
    for file in [file for folder in WITHOUT_TORCH for file in sources(folder)]:
        groups["-".join(file.relative_to(ROOT / "csrc").with_suffix("").parts)] = [file]
    with ThreadPoolExecutor(jobs) as pool:
        findings = filter(None, pool.map(check, groups, groups.values()))
        sys.exit("\n".join(findings) or None)


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 2)
