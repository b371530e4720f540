# SPDX-License-Identifier: BSD-3-Clause
"""Sources of one folder, compiled as one: most of the time goes to the headers of torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path


def compiled_together(sources: Iterable[str], folders: Sequence[str], build: Path) -> list[str]:
    """Replaces the sources of each folder by one file that includes them.

    Args:
        sources: the paths of sources, relative to the root of the project.
        folders: the folders in csrc whose sources are compiled together.
        build: the folder for the files that are made.

    Returns:
        The sources to compile. Those of other folders stay.
    """
    members: dict[str, list[str]] = {folder: [] for folder in folders}
    alone: list[str] = []
    for source in sources:
        folder = Path(source).parent.as_posix().removeprefix("csrc/")
        members.get(folder, alone).append(source)
    made = [_write(build / f"{folder}.cpp", found) for folder, found in members.items() if found]
    return [*alone, *made]


def _write(file: Path, sources: Sequence[str]) -> str:
    """Writes the file, unless it is there already: ninja compiles what has a newer date."""
    text = "".join(f'#include "{source.removeprefix("csrc/")}"\n' for source in sources)
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists() or file.read_text() != text:
        file.write_text(text)
    return str(file)
