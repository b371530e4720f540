# SPDX-License-Identifier: BSD-3-Clause
"""NVIDIA's Multi-Process Service, of one's own: processes that share a GPU then run at once."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cluster import hosts

CONTROL = "nvidia-cuda-mps-control"


@contextmanager
def service() -> Iterator[dict[str, str]]:
    """Runs the daemon; yields the variables that its clients need in their environment."""
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
        with hosts.uninterrupted():
            _stop(folder)


def sweep() -> None:
    """Stops the daemons that runs which are no longer alive have left."""
    for folder in Path(tempfile.gettempdir()).glob("psgd-*-mps"):
        if hosts.is_left(folder.name):
            _stop(folder)


def _stop(folder: Path) -> None:
    """After its clients have ended."""
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
    hosts.kill_marked(folder.name.removesuffix("-mps"))  # if it did not heed that
    shutil.rmtree(folder)


def _variables(folder: Path) -> dict[str, str]:
    return {"CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}


def _environment(folder: Path) -> dict[str, str]:
    return {**os.environ, **_variables(folder), hosts.MARK: folder.name.removesuffix("-mps")}
