# SPDX-License-Identifier: BSD-3-Clause
"""Starts programs that use Ray, each with a Ray session of its own that ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from support.deadline import DEADLOCK


def ray_driver(program: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs a program that starts Ray. It must end without an error, and so must Ray's processes.

    Ray's files are in a temporary folder, and it reports nothing about its use.

    Args:
        program: the program.
        arguments: those of the program.
    """
    # Ray makes sockets in this folder. A socket's path has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        # Ray also writes a file to the home folder.
        own = {"HOME": folder, "RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
        # Workers import the modules beside the program as it does.
        own["PYTHONPATH"] = os.pathsep.join([str(program.parent), os.environ["PYTHONPATH"]])
        try:
            ended = subprocess.run(
                [sys.executable, str(program), *map(str, arguments)],
                env={**os.environ, **own},
                capture_output=True,
                text=True,
                timeout=DEADLOCK,
                check=False,
            )
        finally:
            left = _end_processes(folder)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert not left, f"Ray left these processes behind: {left}"
    return ended


def _end_processes(folder: str) -> list[str]:
    """Waits until no process has this session's environment. Kills and returns those that do.

    Ray's processes end by themselves, a little after the program.
    """
    deadline = time.monotonic() + DEADLOCK
    while (left := _processes(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in left:
        os.kill(process, signal.SIGKILL)
    return list(left.values())


def _processes(folder: str) -> dict[int, str]:
    """The command lines of the processes whose environment names the folder, by process ID."""
    mark = f"RAY_TMPDIR={folder}".encode()
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes():
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(process.name)] = command.decode(errors="replace")
        except OSError:  # it has ended, or is another user's
            continue
    return found
