# SPDX-License-Identifier: BSD-3-Clause
"""When, where and of what figures were measured."""

from __future__ import annotations

import platform
import subprocess
from datetime import date
from pathlib import Path

import torch


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
