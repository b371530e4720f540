# SPDX-License-Identifier: BSD-3-Clause
"""The matrices that parameters are compressed as."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from torch_powersgd._core import _C
from torch_powersgd.options import Options


def as_reals(tensor: torch.Tensor) -> torch.Tensor:
    """A parameter or gradient as DDP reduces it: complex numbers as pairs of real ones."""
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor


def highest_rank(parameters: Iterable[torch.Tensor], options: Options) -> int:
    """The highest matrix rank at which any of them is compressed. It is 0 if there is none."""
    highest = 0
    for parameter in parameters:
        rows, cols = _C.matrix_shape(list(as_reals(parameter).shape), [])
        bound = rows * cols / (max(rows + cols, 1) * options.min_compression_rate)
        highest = max(highest, min(math.ceil(bound) - 1, _C.max_rank))
    return highest
