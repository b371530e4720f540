# SPDX-License-Identifier: BSD-3-Clause
"""The date, device, commit and torch release of a measurement."""

from __future__ import annotations

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


def provenance(device: str) -> dict[str, str]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "date": date.today().isoformat(),
        "device": device,
        "commit": commit.stdout.strip(),
        "torch": torch.__version__,
    }


def heading(record: dict[str, Any], *more: str) -> Console:
    """Prints the provenance of a record. Returns the console for the rest."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = 180  # rich takes 80
    about = (f"{name} {record[name]}" for name in PROVENANCE)
    console.print(*about, *more, sep=", ", highlight=False)
    return console
