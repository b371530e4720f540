# SPDX-License-Identifier: BSD-3-Clause
"""Counts of what a process has: memory, threads, sockets, bytes of a connection."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import socket
import struct
import time
from pathlib import Path
from typing import Any

from local_ranks import anonymous_memory

_TCP_BYTES_AT = 120  # of tcpi_bytes_acked in Linux's struct tcp_info; tcpi_bytes_received follows


def touched_memory() -> int:
    """The bytes of this process's own memory, after it has given back what is free."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return anonymous_memory()


def handles() -> dict[str, int]:
    """The number of threads, open files and sockets among them."""
    targets = [_target(descriptor) for descriptor in _descriptors()]
    return {
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "files": sum(bool(target) for target in targets),
        "sockets": sum(target.startswith("socket:") for target in targets),
    }


def bytes_to_port(port: int) -> int:
    """The bytes, both ways, of this process's connections to a port."""
    total = 0
    for descriptor in _descriptors():
        if not _target(descriptor).startswith("socket:"):
            continue
        with contextlib.suppress(OSError):  # it listens, or is no connection
            total += _bytes_of_connection(descriptor, port)
    return total


class Laps:
    """The seconds, and the processor's seconds, of parts of a run that follow each other."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.processor: dict[str, float] = {}
        self.start()

    def start(self) -> None:
        self._wall, self._processor = time.monotonic(), time.process_time()

    def end(self, name: str) -> None:
        self.seconds[name] = round(time.monotonic() - self._wall, 3)
        self.processor[name] = round(time.process_time() - self._processor, 3)
        self.start()


class Counter:
    """A file that only counts the bytes that are written to it."""

    def __init__(self) -> None:
        self.bytes = 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.bytes += size
        return size

    def flush(self) -> None:
        """Keeps nothing back."""


def _bytes_of_connection(descriptor: int, port: int) -> int:
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.getpeername()[1] != port:
            return 0
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        sent, received = struct.unpack_from("QQ", info, _TCP_BYTES_AT)
        return int(sent + received)


def _descriptors() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]


def _target(descriptor: int) -> str:
    """The name of an open file. It is empty if the file is closed by now."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""
