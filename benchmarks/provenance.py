# SPDX-License-Identifier: BSD-3-Clause
"""The date, device, commit and torch release of a measurement."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from rich.console import Console

PROVENANCE = ("date", "device", "commit", "torch")  # the first fields of a record


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def commit() -> str:
    """The commit, which POWERSGD_COMMIT names where there is no git. It is empty if none does."""
    if named := os.environ.get("POWERSGD_COMMIT"):
        return named
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # there is no git
        return ""
    return result.stdout.strip()


def provenance(device: str) -> dict[str, str]:
    return {
        "date": date.today().isoformat(),
        "device": device,
        "commit": commit(),
        "torch": torch.__version__,
    }


def write(record: dict[str, Any], file: Path | None) -> None:
    """Writes a record, as JSON, if there is a file for it.

    Benchmarks call it whenever they have measured something, so that a time limit loses nothing.
    The file is replaced as a whole, and is JSON at any time.
    """
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.part")
    part.write_text(json.dumps(record, indent=2) + "\n")
    part.replace(file)


def heading(record: dict[str, Any], *more: str) -> Console:
    """Prints the provenance of a record. Returns the console for the rest."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = 180  # rich takes 80
    about = (f"{name} {record[name]}" for name in PROVENANCE)
    console.print(*about, *more, sep=", ", highlight=False)
    return console
