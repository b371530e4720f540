# SPDX-License-Identifier: BSD-3-Clause
"""The CPU stages run on torch's threads."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os
import torch
import torch_powersgd as tp
from support.stages import run_stages
from torch_powersgd._core import _C

torch.set_num_threads(1)
options = tp.Options.hook_defaults(matrix_approximation_rank=2)._core()
compressor = _C.BucketCompressor([[2000, 1000]], options, torch.float32)
gradient = torch.ones(2000 * 1000)
counts = []
for step in range(3):  # the first one allocates
    counts.append(len(os.listdir("/proc/self/task")))
    run_stages(compressor, gradient, step)
    if step == 1:
        torch.set_num_threads(4)
counts.append(len(os.listdir("/proc/self/task")))
print(*counts)
"""


def test_the_stages_run_on_as_many_threads_as_torch_has() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100, check=True
    )
    _, before, with_one, with_four = map(int, ended.stdout.split())
    assert with_one == before
    assert with_four == with_one + 3
