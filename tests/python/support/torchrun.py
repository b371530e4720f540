# SPDX-License-Identifier: BSD-3-Clause
"""Starts programs by torchrun, as users do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def torchrun(
    *arguments: object, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs two ranks of one thread each. Both must end without an error.

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
    return ended
