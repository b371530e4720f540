# SPDX-License-Identifier: BSD-3-Clause
"""Writes the result files. Each is replaced atomically, so it is complete at any time."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

MOST_BYTES = 4_000_000  # of a file in the archive; a longer file keeps only its end


def replace(file: Path, contents: bytes) -> None:
    part = file.with_name(f"{file.name}.part")
    part.write_bytes(contents)
    part.replace(file)


def archive(folder: Path) -> bytes:
    """All files of a folder that others may be writing to."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for file in sorted(folder.rglob("*")):
            try:
                contents = file.read_bytes()[-MOST_BYTES:]
            except OSError:  # a folder, or a file that is gone
                continue
            member = tarfile.TarInfo(str(file.relative_to(folder.parent)))
            member.size = len(contents)
            archive.addfile(member, io.BytesIO(contents))
    return packed.getvalue()
