# SPDX-License-Identifier: BSD-3-Clause
"""Starts programs with torchrun, as users do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.deadline import DEADLOCK

# Parts of lines that any job may log.
NOTICES = (
    "are compressed at matrix rank",
    "loaded the state of step",
    "nothing has been compressed in",
)


def torchrun(
    *arguments: object, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs two processes with one thread each. Both must end without an error or a warning.

    Args:
        arguments: torchrun's own, the program, and the program's.
        cwd: the program's working directory.
        environment: additions to this process's environment.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = subprocess.run(
        [sys.executable, *launcher, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=DEADLOCK,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert not warnings_in(ended.stderr)
    return ended


def warnings_in(stderr: str) -> list[str]:
    """This package's lines in a program's output, except notices.

    Without a logging configuration, notices and warnings look alike.
    """
    said = [line for line in stderr.splitlines() if "torch_powersgd:" in line]
    return [line for line in said if not any(notice in line for notice in NOTICES)]
