# SPDX-License-Identifier: BSD-3-Clause
"""Counts a process's memory, threads, open files, sockets and sent bytes."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import socket
import struct
from pathlib import Path

_TCP_BYTES_AT = 120  # of tcpi_bytes_acked in Linux's struct tcp_info; tcpi_bytes_received follows


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


def threads() -> list[str]:
    """The names of the threads."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the thread has ended
            names.append((task / "comm").read_text().strip())
    return names


def files() -> dict[int, str]:
    """The names of the open files, by descriptor."""
    found = {}
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it has been closed
            found[int(descriptor)] = os.readlink(f"/proc/self/fd/{descriptor}")
    return found


def sockets() -> list[int]:
    """The descriptors of the network sockets."""
    found = []
    for descriptor, name in files().items():
        if name.startswith("socket:"):
            with socket.socket(fileno=os.dup(descriptor)) as copy:
                if copy.family in (socket.AF_INET, socket.AF_INET6):
                    found.append(descriptor)
    return found


def bytes_to_port(port: int) -> int:
    """The bytes, both ways, of this process's connections to a port."""
    total = 0
    for descriptor in sockets():
        # A listening socket has no peer.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
            if copy.getpeername()[1] == port:
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += sum(struct.unpack_from("QQ", info, _TCP_BYTES_AT))
    return total


def _number_of(file: Path, name: str) -> int:
    for line in file.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise RuntimeError(f"{file} has no {name}")
