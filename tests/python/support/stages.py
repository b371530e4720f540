# SPDX-License-Identifier: BSD-3-Clause
"""Runs the stages in one process, without a group."""

from __future__ import annotations

import torch

from torch_powersgd._core import _C


def run_stages(compressor: _C.BucketCompressor, gradient: torch.Tensor, step: int) -> None:
    """Runs the stages of one step in a single process. The gradient becomes the output."""
    compressor.project(gradient, step)
    compressor.orthogonalize()
    compressor.back_project()
    compressor.reconstruct()
