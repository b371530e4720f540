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
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch.utils.cpp_extension import include_paths

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

from setup_support.together import WITH_TORCH, include_all  # noqa: E402

BUILD = ROOT / "build" / "tidy"
WITHOUT_TORCH = ("core", "kernels")
# The macros that setup.py and torch's build extension define.
MACROS = {
    "POWERSGD_TORCH_VERSION": '"0"',
    "POWERSGD_KERNELS_VERSION": '"0"',
    "POWERSGD_CUDA_ARCHITECTURES": '""',
    "TORCH_EXTENSION_NAME": "_C",
    "USE_C10D_GLOO": "1",
    "USE_DISTRIBUTED": "1",
}


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / "csrc" / folder).rglob("*.cpp"))


def flags() -> list[str]:
    """The compiler flags."""
    system = [*include_paths(), sysconfig.get_path("include")]
    # clang does not know `#pragma GCC target`, so the intrinsics of every target are enabled here.
    machine = ["-march=x86-64-v4"] if platform.machine() == "x86_64" else []
    return [
        "-std=c++20",
        *machine,
        *(f"-I{ROOT / folder}" for folder in ("include", "csrc")),
        *(f"-isystem{folder}" for folder in system),
        *(f"-D{name}={value}" for name, value in MACROS.items()),
    ]


def fingerprint(files: Iterable[Path], arguments: list[str]) -> str:
    """A digest of everything that a check depends on, except torch itself."""
    folders = [ROOT / folder for folder in ("include", "csrc")]
    headers = [f for folder in folders for f in folder.rglob("*.[hi]*")]  # .h and .inl
    digest = hashlib.sha256(repr(arguments).encode())
    for file in sorted([*files, *headers, ROOT / ".clang-tidy"]):
        digest.update(str(file).encode() + file.read_bytes())
    return digest.hexdigest()


def check(name: str, files: list[Path]) -> str:
    """Checks sources as one file. Returns the findings, or an empty string if there are none."""
    passed = BUILD / f"{name}.passed"
    arguments = flags()
    print_of_inputs = fingerprint(files, arguments)
    if passed.exists() and passed.read_text() == print_of_inputs:
        return ""
    together = BUILD / f"{name}.cpp"
    include_all(together, (file.relative_to(ROOT).as_posix() for file in files))
    ended = subprocess.run(
        ["clang-tidy", "--quiet", str(together), "--", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode == 0:
        passed.write_text(print_of_inputs)
        return ""
    return ended.stdout.replace(f"{ROOT}/", "") or ended.stderr


def main(jobs: int) -> int:
    BUILD.mkdir(parents=True, exist_ok=True)
    groups = {folder: sources(folder) for folder in WITH_TORCH}
    for file in [file for folder in WITHOUT_TORCH for file in sources(folder)]:
        groups["-".join(file.relative_to(ROOT / "csrc").with_suffix("").parts)] = [file]
    with ThreadPoolExecutor(jobs) as pool:
        findings = [text for text in pool.map(check, groups, groups.values()) if text]
    print(*findings, sep="\n", end="")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if sys.argv[1:] else 2))
