# SPDX-License-Identifier: BSD-3-Clause
"""The stages of one rank, without a group."""

from __future__ import annotations

import torch

from torch_powersgd._core import _C


def run_stages(compressor: _C.BucketCompressor, gradient: torch.Tensor, step: int) -> None:
    """A step of one rank, in place."""
    compressor.project(gradient, step)
    compressor.orthogonalize()
    if compressor.sends == "PQ":
        compressor.back_project()
    compressor.reconstruct()
