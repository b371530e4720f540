# SPDX-License-Identifier: BSD-3-Clause
"""The CPU stages run on torch's threads."""

from __future__ import annotations

import os

import torch

import torch_powersgd as tp
from support.on_ranks import on_ranks
from support.stages import run_stages
from torch_powersgd._core import _C


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


@on_ranks(1, backend=None)
def test_the_stages_run_on_as_many_threads_as_torch_has(rank: int) -> None:
    options = tp.Options.hook_defaults(matrix_approximation_rank=2)._core()
    compressor = _C.BucketCompressor([[2000, 1000]], options, torch.float32)
    gradient = torch.ones(2000 * 1000)
    run_stages(compressor, gradient, 0)  # allocates
    before = _threads()
    run_stages(compressor, gradient, 1)
    assert _threads() == before, "torch has one thread"
    torch.set_num_threads(4)
    run_stages(compressor, gradient, 2)
    assert _threads() == before + 3
