# SPDX-License-Identifier: BSD-3-Clause
"""A private Multi-Process Service of NVIDIA: processes that share a GPU run at the same time."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cluster import hosts, signals

CONTROL = "nvidia-cuda-mps-control"


@contextmanager
def service(logs: Path | None = None) -> Iterator[dict[str, str]]:
    """Runs the daemon. Yields the variables that its clients need in their environment.

    In the end its logs, which alone say why a client was refused, are copied to the folder `logs`.
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
    hosts.kill_marked(folder.name.removesuffix("-mps"))  # if it does not heed the command
    shutil.rmtree(folder)


def _variables(folder: Path) -> dict[str, str]:
    return {"CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}


def _environment(folder: Path) -> dict[str, str]:
    return {**os.environ, **_variables(folder), hosts.MARK: folder.name.removesuffix("-mps")}
