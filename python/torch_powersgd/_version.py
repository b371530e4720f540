# SPDX-License-Identifier: BSD-3-Clause
"""The one place where the version is written."""

from __future__ import annotations

__version__ = "0.1.0"


def wheel_version(torch_version: str, cuda: str | None) -> str:
    """Returns the version of the wheel for a torch release, such as 0.1.0+torch2.13.0.cu130.

    Args:
        torch_version: the version of torch. Its local part is ignored.
        cuda: the release of CUDA that the kernels are built with, or None without kernels.
    """
    variant = f"cu{cuda.replace('.', '')}" if cuda else "cpu"
    return f"{__version__}+torch{torch_version.split('+')[0]}.{variant}"
