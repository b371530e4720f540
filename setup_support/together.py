# SPDX-License-Identifier: BSD-3-Clause
"""Compiles the sources of a folder as one file: most of the time goes to torch's headers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

# The folders of csrc that include torch. The slowest to compile come first, so that none ends
# last.
WITH_TORCH = ("bindings", "group", "model", "compressor", "engine")


def hash_of_kernels(root: Path) -> str:
    """A hash of the sources that decide the bits on which ranks must agree."""
    folders = (root / "csrc" / "kernels", root / "include" / "powersgd" / "kernels")
    files = [file for folder in folders for file in folder.rglob("*.*")]
    contents = b"".join(file.read_bytes() for file in sorted(files))
    return hashlib.sha256(contents).hexdigest()[:8]


def compiled_together(
    sources: Iterable[str], folders: Sequence[str], build: Path, heads: Mapping[str, str]
) -> list[str]:
    """Replaces the sources of each folder by one file that includes them.

    Args:
        sources: the paths of sources, relative to the root of the project.
        folders: the folders in csrc whose sources are compiled together.
        build: the folder for the generated files.
        heads: the first lines of a folder's file, by folder.

    Returns:
        The sources to compile. Those of other folders are unchanged.
    """
    members: dict[str, list[str]] = {folder: [] for folder in folders}
    alone: list[str] = []
    for source in sources:
        folder = Path(source).parent.as_posix().removeprefix("csrc/")
        members.get(folder, alone).append(source)
    made = [build / f"{folder}.cpp" for folder, found in members.items() if found]
    for file, found in zip(made, filter(None, members.values()), strict=True):
        include_all(file, found, heads.get(file.stem, ""))
    return [*alone, *map(str, made)]


def include_all(file: Path, sources: Iterable[str], head: str = "") -> None:
    """Writes a file that includes all sources, whose paths are relative to the project's root.

    An unchanged file keeps its time stamp, because ninja recompiles what is newer.
    """
    text = head + "".join(f'#include "{source.removeprefix("csrc/")}"\n' for source in sources)
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists() or file.read_text() != text:
        file.write_text(text)
