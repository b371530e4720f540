# SPDX-License-Identifier: BSD-3-Clause
"""Counts a process's memory, threads, sockets and sent bytes."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import socket
from pathlib import Path


def available_memory() -> int:
    """The bytes of memory that are available on the machine."""
    return 1024 * _number_of(Path("/proc/meminfo"), "MemAvailable")


def touched_memory() -> int:
    """The bytes of this process's private memory, after returning what is free."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # malloc_trim is glibc's
        ctypes.CDLL(None).malloc_trim(0)
    return 1024 * _number_of(Path("/proc/self/status"), "RssAnon")


def bytes_written() -> int:
    """The bytes that this process has passed to write() and similar calls, as Gloo does."""
    return _number_of(Path("/proc/self/io"), "wchar")


def threads() -> int:
    """The number of threads."""
    return len(os.listdir("/proc/self/task"))


def sockets() -> int:
    """The number of network sockets."""
    count = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it has been closed
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(descriptor))) as copy:
                    count += copy.family in (socket.AF_INET, socket.AF_INET6)
    return count


def _number_of(file: Path, name: str) -> int:
    for line in file.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise RuntimeError(f"{file} has no {name}")
