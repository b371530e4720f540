# SPDX-License-Identifier: BSD-3-Clause
"""The matrices that parameters are compressed as."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from torch_powersgd._core import _C
from torch_powersgd.option_values import dtype_name
from torch_powersgd.options import Options, to_core


def as_reals(tensor: torch.Tensor) -> torch.Tensor:
    """A parameter or gradient as DDP reduces it: complex numbers as pairs of real ones."""
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor


def highest_rank(parameters: Iterable[torch.Tensor], options: Options) -> int:
    """The highest matrix rank at which any of them is compressed. It is 0 if there is none."""
    highest = 0
    for parameter in parameters:
        if is_exact(parameter):
            continue
        rows, cols = _C.matrix_shape(list(as_reals(parameter).shape), [])
        bound = rows * cols / (max(rows + cols, 1) * options.min_compression_rate)
        highest = max(highest, min(math.ceil(bound) - 1, _C.max_rank))
    return highest


def beyond_the_rate(parameters: Mapping[str, torch.Tensor], options: Options) -> dict[str, int]:
    """The parameters that only a matrix rank of their own keeps from being compressed, and it."""
    core, found = to_core(options), {}
    for name, parameter in parameters.items():
        real = as_reals(parameter)
        own = _C.rank_of(name, core)
        with_own, with_all = (
            _C.matrix_rank(list(real.shape), core, real.dtype, rank) for rank in (own, None)
        )
        if own and not with_own and with_all:
            found[name] = own
    return found


def is_exact(parameter: torch.Tensor) -> bool:
    """Whether the gradient is averaged exactly because of its dtype, such as float64."""
    return not _C.is_compressible(as_reals(parameter).dtype)


def compressible(parameters: Sequence[torch.Tensor], options: Options) -> list[str]:
    """Which matrix ranks compress any of them, and which dtypes none does, in sentences."""
    highest, exact = highest_rank(parameters, options), exact_dtypes(parameters)
    return [
        f"The highest matrix rank that compresses a weight of this model is {highest}."
        if highest
        else "This model has no weight that any matrix rank compresses.",
        *([f"Parameters in {exact} are averaged exactly."] if exact else []),
    ]


def exact_dtypes(parameters: Iterable[torch.Tensor]) -> str:
    """The dtypes of those that are exact, such as "float64". Empty if there is none."""
    return " and ".join(sorted({dtype_name(as_reals(p).dtype) for p in parameters if is_exact(p)}))
