# SPDX-License-Identifier: BSD-3-Clause
"""Builds torch_powersgd._C and states what depends on the build; the rest is in pyproject.toml.

    pip install --no-build-isolation -e .     or     python setup.py develop

Environment: MAX_JOBS (default 2), POWERSGD_BUILD_CUDA=0|1 (default: 1 where torch has CUDA and the
whole toolkit is found), CUDA_HOME, TORCH_CUDA_ARCH_LIST, CXX.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.develop import develop
from setuptools.command.egg_info import egg_info
from setuptools.command.sdist import sdist

try:
    import torch
    from torch.utils import cpp_extension
except ModuleNotFoundError as error:
    raise SystemExit(
        f"{error}. torch-powersgd is compiled against the torch that will load it: install torch, "
        "setuptools and ninja first, then pip install --no-build-isolation ."
    ) from error

ROOT = Path(__file__).parent.resolve()
sys.path.append(str(ROOT))  # a build front end does not add it

from setup_support import metadata, toolkit  # noqa: E402
from setup_support.progress import short_commands  # noqa: E402
from setup_support.together import WITH_TORCH, compiled_together, hash_of_kernels  # noqa: E402

WITHOUT_TORCH = ["core", "kernels/cpu", "kernels/shared"]
CUDA_CHOICE = os.environ.get("POWERSGD_BUILD_CUDA", "")
CUDA_HOME = cpp_extension.CUDA_HOME
VERSION = runpy.run_path(str(ROOT / "python" / "torch_powersgd" / "_version.py"))["__version__"]


def sources(folder: str, suffix: str) -> list[str]:
    return sorted(str(f.relative_to(ROOT)) for f in (ROOT / folder).rglob(f"*{suffix}"))


def headers() -> list[str]:
    """The headers. As dependencies, they make build_ext notice when only a header changes."""
    suffixes = {".h", ".inl", ".cuh"}
    files = [f for folder in ("include", "csrc") for f in (ROOT / folder).rglob("*")]
    return sorted(str(f.relative_to(ROOT)) for f in files if f.suffix in suffixes)


def without_their_warnings() -> list[str]:
    """Flags that silence warnings in the headers of torch and Python, as system headers.

    torch names the same folders with -I, which the compiler then ignores.
    """
    folders = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    return [f"-isystem{folder}" for folder in folders]


def extension(cuda: toolkit.Toolkit) -> Any:
    with_cuda = toolkit.is_wanted(CUDA_CHOICE, cuda.missing)
    files = [
        file
        for folder in [*WITHOUT_TORCH, *WITH_TORCH]
        for file in sources(f"csrc/{folder}", ".cpp")
    ]
    include_dirs = [str(ROOT / "include"), str(ROOT / "csrc")]
    library_dirs: list[str] = []
    torch_version = torch.__version__.split("+")[0]
    # The package compares this with the torch it runs with, as a mismatch would corrupt memory.
    macros: list[tuple[str, str | None]] = [("POWERSGD_TORCH_VERSION", f'"{torch_version}"')]
    # Python's own -g would make the module ten times larger. Without -fopenmp, at::parallel_for is
    # a serial loop. The OpenMP runtime is the one that torch has loaded.
    flags = {"cxx": ["-O3", "-Wall", "-Wextra", "-g0", "-fopenmp", *without_their_warnings()]}
    if with_cuda:
        files += sources("csrc/kernels/cuda", ".cu") + sources("csrc/kernels/cuda", ".cpp")
        macros.append(("POWERSGD_WITH_CUDA", None))
        flags["nvcc"] = ["-O3"]
        # torch itself adds CUDA_HOME's include, and lib64 or lib.
        include_dirs += [str(cuda.include)] if "targets" in cuda.include.parts else []
        library_dirs.append(str(cuda.lib))
        if not torch.cuda.is_available():
            architectures = toolkit.default_architectures(torch.version.cuda or "")
            os.environ.setdefault("TORCH_CUDA_ARCH_LIST", architectures)

    kind: Any = cpp_extension.CUDAExtension if with_cuda else cpp_extension.CppExtension
    return kind(
        "torch_powersgd._C",
        files,
        include_dirs=include_dirs,
        library_dirs=library_dirs,
        depends=headers(),
        define_macros=macros,
        extra_compile_args=flags,
        # torch's own libstdc++, even where the compiler would link a static one: the streams of two
        # copies don't know each other's locales, and crash.
        extra_link_args=["-fopenmp", "-l:libstdc++.so.6"],
    )


class Build(cpp_extension.BuildExtension):
    def run(self) -> None:
        # For an editable install, setuptools would compile all files in a new temporary folder.
        # `build_ext --inplace` keeps its folder, in which ninja compiles only what has changed.
        if self.editable_mode:
            folder = f"temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
            self.build_temp = str(ROOT / "build" / folder)
        with_cuda = toolkit.is_wanted(CUDA_CHOICE, CUDA.missing)
        nvcc_flags = cpp_extension._get_cuda_arch_flags() if with_cuda else []
        architectures = ",".join(toolkit.architectures(nvcc_flags))
        for each in self.extensions or []:
            each.define_macros.append(("POWERSGD_CUDA_ARCHITECTURES", f'"{architectures}"'))
            each.depends += each.sources
            # The ranks compare this, because different kernels may give different bits.
            kernels = f"{VERSION} ({hash_of_kernels(ROOT)})"
            heads = {"bindings": f'#define POWERSGD_KERNELS_VERSION "{kernels}"\n'}
            together = Path("build", "together")
            each.sources = compiled_together(each.sources, WITH_TORCH, together, heads)
        what = toolkit.describe(CUDA_CHOICE, CUDA.missing, nvcc_flags)
        print(f"building torch_powersgd for torch {torch.__version__}: {what}", flush=True)
        try:
            with short_commands(ROOT):
                super().run()
        except Exception as error:
            if not with_cuda:
                raise
            raise SystemExit(f"{error}\n{toolkit.failure_hint(CUDA_HOME)}") from error


class Develop(develop):  # type: ignore[misc]
    def initialize_options(self) -> None:
        pass  # the inherited method warns that the command is deprecated

    def run(self) -> None:
        # pip shows no progress of a build. So build first, and leave only linking to pip.
        self.reinitialize_command("build_ext", inplace=True)
        self.run_command("build_ext")
        # The inherited command isolates the build, which then finds no torch.
        pip = [sys.executable, "-m", "pip", "install"]
        flags = ["--no-build-isolation", "--no-deps", "--use-pep517"]
        subprocess.check_call([*pip, *flags, "-e", str(ROOT)])


class EggInfo(egg_info):  # type: ignore[misc]
    def finalize_options(self) -> None:
        # A binary fits one torch, and says so in its version. The sources fit many.
        if "sdist" not in self.distribution.commands:
            cuda = torch.version.cuda if toolkit.is_wanted(CUDA_CHOICE, CUDA.missing) else None
            self.tag_build = metadata.local_version(torch.__version__, cuda)
        super().finalize_options()


class Sdist(sdist):  # type: ignore[misc]
    def run(self) -> None:
        # The sources fit many releases of torch. setuptools keeps the requirements in two places.
        for owner in (self.distribution, self.distribution.metadata):
            owner.install_requires = metadata.requirements()
        super().run()


def main() -> None:
    os.environ.setdefault("MAX_JOBS", "2")  # a file that includes torch takes 1.5 GB to compile
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    setup(
        long_description=metadata.absolute_links(
            readme, metadata.repository(ROOT / "pyproject.toml")
        ),
        long_description_content_type="text/markdown",
        install_requires=metadata.requirements(torch.__version__),
        ext_modules=[extension(CUDA)],
        cmdclass={
            "build_ext": Build,
            "develop": Develop,
            "egg_info": EggInfo,
            "sdist": Sdist,
        },
    )


CUDA = toolkit.examine(CUDA_HOME, torch.version.cuda)
if __name__ == "__main__":
    main()
