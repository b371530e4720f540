# SPDX-License-Identifier: BSD-3-Clause
"""A private daemon of NVIDIA's Multi-Process Service, for processes that share a GPU."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from launcher import hosts, signals

CONTROL = "nvidia-cuda-mps-control"
_PATIENCE_SECONDS = 10


@contextmanager
def service(logs: Path | None = None) -> Iterator[dict[str, str]]:
    """Runs the daemon. Yields the environment variables that its clients need.

    At the end, its logs are copied to the folder `logs`. Only they say why a client was refused.
    """
    folder = Path(tempfile.gettempdir(), f"{hosts.owner()}-mps")
    try:
        folder.mkdir()
        command = [CONTROL, "-d"]
        result = subprocess.run(
            command, env=_environment(folder), timeout=60, start_new_session=True
        )
        if result.returncode:
            raise hosts.ClusterError(f"{' '.join(command)} ended with {result.returncode}")
        yield _variables(folder)
    finally:
        with signals.uninterrupted():
            if logs is not None:
                logs.mkdir(parents=True, exist_ok=True)
                for log in folder.glob("*.log"):
                    shutil.copy(log, logs)
            _stop(folder)


def sweep() -> None:
    """Stops the daemons of runs that are no longer alive."""
    for folder in Path(tempfile.gettempdir()).glob("psgd-*-mps"):
        if hosts.is_left(folder.name):
            _stop(folder)


def _stop(folder: Path) -> None:
    """Stops the daemon. Its clients must have ended."""
    if not folder.exists():
        return
    with suppress(FileNotFoundError, subprocess.TimeoutExpired):
        subprocess.run(
            [CONTROL],
            input="quit\n",
            text=True,
            env=_environment(folder),
            capture_output=True,
            timeout=30,
            start_new_session=True,
        )
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while left := daemons(folder):  # those that ignore the command
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise hosts.ClusterError(f"processes {left} did not end")
        time.sleep(0.05)
    shutil.rmtree(folder)


def daemons(folder: Path) -> list[int]:
    """The processes that were started with this folder in their environment."""
    wanted = f"CUDA_MPS_PIPE_DIRECTORY={folder}".encode()
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if wanted in environment.read_bytes().split(b"\0"):
                found.append(int(environment.parent.name))
    return found


def _variables(folder: Path) -> dict[str, str]:
    return {"CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}


def _environment(folder: Path) -> dict[str, str]:
    return {**os.environ, **_variables(folder)}
