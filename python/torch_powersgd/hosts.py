# SPDX-License-Identifier: BSD-3-Clause
"""Which processes run on one host, so that they share its link to the others."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

VARIABLE = "POWERSGD_HOST"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def this_host() -> str:
    """Returns what the processes of this host have in common: its name and when it was started.

    The environment variable POWERSGD_HOST takes its place, for containers that hide the host.
    """
    if named := os.environ.get(VARIABLE):
        return named
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{socket.gethostname()} {boot}".strip()


def numbered(hosts: Sequence[str]) -> list[int]:
    """Numbers hosts by their first processes: [0, 1, 0] for ["a", "b", "a"]."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(host, len(numbers)) for host in hosts]


def in_two_levels(hosts: Sequence[int]) -> bool:
    """Whether hosts add the payloads of their processes first, as the core's ``levels_of`` decides.

    Args:
        hosts: The number of each process's host.
    """
    sizes = {*Counter(hosts).values()}
    return len(set(hosts)) > 1 and len(sizes) == 1 and sizes != {1}
