# SPDX-License-Identifier: BSD-3-Clause
"""The metadata that pyproject.toml cannot state, because it depends on the build."""

from __future__ import annotations

import re
from pathlib import Path

OLDEST_TORCH = "2.11"


def requirements(torch_version: str | None = None) -> list[str]:
    """The requirements of the package. A binary requires exactly the torch it was built against.

    python/torch_powersgd/_core.py compares the same part of the version, without "+cpu".
    """
    if torch_version is None:
        return [f"torch>={OLDEST_TORCH}"]
    return [f"torch=={torch_version.split('+')[0]}"]


def local_version(torch_version: str, cuda: str | None) -> str:
    """The end of a wheel's version, such as +torch2.13.0.cu130, which names the torch that it fits.

    Args:
        torch_version: the version of torch. Its own local part is ignored.
        cuda: the CUDA release that the kernels are built with, or None without kernels.
    """
    variant = f"cu{cuda.replace('.', '')}" if cuda else "cpu"
    return f"+torch{torch_version.split('+')[0]}.{variant}"


def repository(pyproject: Path) -> str:
    """The URL of the repository, from [project.urls]. (Python 3.10 has no TOML parser.)"""
    match = re.search(r'^Repository = "([^"]+)"$', pyproject.read_text(), re.MULTILINE)
    if match is None:
        raise SystemExit(f"{pyproject} has no Repository in [project.urls]")
    return match[1]


def absolute_links(markdown: str, repository: str) -> str:
    """Points relative links to the repository, because a package index has only the text."""

    def absolute(match: re.Match[str]) -> str:
        kind = "raw" if match[1].startswith("!") else "blob"
        return f"{match[1]}{repository}/{kind}/HEAD/{match[2]}"

    return re.sub(r"(!\[[^\]]*\]\(|\]\()(?!https?:)([^)]+)", absolute, markdown)
