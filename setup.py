# SPDX-License-Identifier: BSD-3-Clause
"""Builds torch_powersgd._C; everything else is in pyproject.toml.

    pip install --no-build-isolation -e .     or     python setup.py develop

Environment: MAX_JOBS (default 2), POWERSGD_BUILD_CUDA=0|1 (default: when torch has CUDA and the
toolkit is found), TORCH_CUDA_ARCH_LIST, CXX.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.develop import develop

try:
    import torch
    from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension
except ModuleNotFoundError as error:
    raise SystemExit(
        f"{error}. torch-powersgd is compiled against the torch that will load it: install torch, "
        "setuptools and ninja first, then pip install --no-build-isolation ."
    ) from error

ROOT = Path(__file__).parent.resolve()
HOST_SOURCES = ["plan", "kernels/cpu", "compressor", "backend", "bindings"]


def sources(folder: str, suffix: str) -> list[str]:
    return sorted(str(f.relative_to(ROOT)) for f in (ROOT / folder).glob(f"*{suffix}"))


def headers() -> list[str]:
    """Listed as dependencies, so that build_ext notices when only a header has changed."""
    suffixes = {".h", ".cuh"}
    folders = [ROOT / "include", ROOT / "csrc"]
    return sorted(str(f) for folder in folders for f in folder.rglob("*") if f.suffix in suffixes)


def build_cuda() -> bool:
    choice = os.environ.get("POWERSGD_BUILD_CUDA", "")
    if choice not in ("", "0", "1"):
        raise SystemExit(f"POWERSGD_BUILD_CUDA is {choice!r}; allowed are 0, 1 and unset")
    possible = {
        "a torch with CUDA": torch.version.cuda is not None,
        "the CUDA toolkit (CUDA_HOME)": CUDA_HOME is not None,
        "csrc/kernels/cuda/*.cu": bool(sources("csrc/kernels/cuda", ".cu")),
    }
    missing = [what for what, there in possible.items() if not there]
    if choice == "1" and missing:
        raise SystemExit("POWERSGD_BUILD_CUDA=1, but this is missing: " + ", ".join(missing))
    return choice != "0" and not missing


def default_cuda_architectures() -> str:
    """What to compile for where no GPU is visible to say so."""
    version = tuple(int(part) for part in (torch.version.cuda or "0.0").split("."))
    return "8.0;9.0;10.0+PTX" if version >= (12, 8) else "8.0;9.0+PTX"


def extension() -> Any:
    cuda = build_cuda()
    files = [file for folder in HOST_SOURCES for file in sources(f"csrc/{folder}", ".cpp")]
    torch_version = torch.__version__.split("+")[0]
    # The package compares this with the torch that loads it: another would load and corrupt memory.
    macros: list[tuple[str, str | None]] = [("POWERSGD_TORCH_VERSION", f'"{torch_version}"')]
    # -g0: Python's own -g would make the module ten times larger. -fopenmp: without it
    # at::parallel_for compiles to a serial loop. The runtime is the one that torch has loaded.
    flags = {"cxx": ["-O3", "-Wall", "-g0", "-fopenmp"]}
    if cuda:
        files += sources("csrc/kernels/cuda", ".cu") + sources("csrc/kernels/cuda", ".cpp")
        macros.append(("POWERSGD_WITH_CUDA", None))
        flags["nvcc"] = ["-O3"]
        if not torch.cuda.is_available():
            os.environ.setdefault("TORCH_CUDA_ARCH_LIST", default_cuda_architectures())

    kind = CUDAExtension if cuda else CppExtension
    return kind(
        "torch_powersgd._C",
        files,
        include_dirs=[str(ROOT / "include"), str(ROOT / "csrc")],
        depends=headers(),
        define_macros=macros,
        extra_compile_args=flags,
        extra_link_args=["-fopenmp"],
    )


class Build(BuildExtension):  # type: ignore[misc]
    def run(self) -> None:
        # setuptools compiles an editable install in a new temporary folder, every file each time.
        # In a folder that stays, ninja compiles what has changed.
        if self.editable_mode:
            self.build_temp = str(ROOT / "build" / f"editable-{sys.implementation.cache_tag}")
        super().run()


class Develop(develop):
    def initialize_options(self) -> None:
        pass  # the inherited one warns that the command is deprecated

    def run(self) -> None:
        # The inherited command isolates the build, where there is no torch to compile against.
        pip = [sys.executable, "-m", "pip", "install"]
        flags = ["--no-build-isolation", "--no-deps", "--use-pep517"]
        subprocess.check_call([*pip, *flags, "-e", str(ROOT)])


os.environ.setdefault("MAX_JOBS", "2")  # a file that includes torch takes 1.5 GB to compile
setup(ext_modules=[extension()], cmdclass={"build_ext": Build, "develop": Develop})
