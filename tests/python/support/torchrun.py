# SPDX-License-Identifier: BSD-3-Clause
"""Starts programs by torchrun, as users do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# Parts of the lines that every job may show.
NOTICES = (
    "are compressed at matrix rank",
    "loaded the state of step",
    "nothing has been compressed in",
)


def torchrun(
    *arguments: object, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs two ranks of one thread each. Both must end without an error or a warning.

    Args:
        arguments: torchrun's own, the program, and the program's.
        cwd: the program's working directory.
        environment: added to this process's.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = subprocess.run(
        [sys.executable, *launcher, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert not warnings_in(ended.stderr)
    return ended


def warnings_in(stderr: str) -> list[str]:
    """The lines of this package in a program's output that are more than a notice.

    A program that has not configured logging shows both alike.
    """
    said = [line for line in stderr.splitlines() if "torch_powersgd:" in line]
    return [line for line in said if not any(notice in line for notice in NOTICES)]
