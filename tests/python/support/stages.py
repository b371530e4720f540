# SPDX-License-Identifier: BSD-3-Clause
"""The stages of one rank, without a group."""

from __future__ import annotations

import torch

from torch_powersgd._core import _C


def run_stages(compressor: _C.BucketCompressor, gradient: torch.Tensor, step: int) -> None:
    """Runs the stages of one step on a rank that is alone. The gradient becomes the output."""
    compressor.project(gradient, step)
    compressor.orthogonalize()
    compressor.back_project()
    compressor.reconstruct()
