# SPDX-License-Identifier: BSD-3-Clause
"""Training without a task. The test chooses every gradient, so the outputs are known."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence

import torch

from support.tensors import Shapes, Tensors

# A convolution, a wide and a tall matrix; then raw segments: a bias, a matrix too small to pay.
SHAPES: dict[str, tuple[int, ...]] = {
    "conv": (16, 3, 5, 5),
    "wide": (12, 41),
    "tall": (50, 9),
    "bias": (16,),
    "small": (3, 4),
}

COMPRESSED = ("conv", "wide", "tall")  # at rank <= 3 and the default min_compression_rate


class Synthetic(torch.nn.Module):
    """A module whose loss is the sum of parameter * coefficient: each gradient is its coefficient.

    A parameter that is not among the coefficients is not used. The parameters are used in the order
    of the coefficients, so their gradients arrive in the reverse order.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterDict()
        for name, parameter in parameters.items():  # one by one: ParameterDict sorts a dict
            self.weights[name] = torch.nn.Parameter(parameter)

    def forward(self, coefficients: Mapping[str, torch.Tensor]) -> torch.Tensor:
        terms = [(self.weights[name] * c).sum().real.double() for name, c in coefficients.items()]
        return torch.stack(terms).sum()


def gradient(
    shape: Sequence[int], *key: object, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Normal random numbers that only depend on the key: each rank can make those of all ranks."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
    return torch.randn(tuple(shape), generator=generator).to(dtype)


def gradients(
    shapes: Shapes, rank: int, step: object, dtype: torch.dtype = torch.float32
) -> Tensors:
    """The gradients of `rank` at `step`."""
    return {name: gradient(shape, name, rank, step, dtype=dtype) for name, shape in shapes.items()}


def mean_gradients(
    shapes: Shapes, ranks: int | Iterable[int], step: object, dtype: torch.dtype = torch.float32
) -> Tensors:
    """The mean over these ranks, or so many, of `gradients`, in float64."""
    members = range(ranks) if isinstance(ranks, int) else ranks
    by_rank = [gradients(shapes, rank, step, dtype) for rank in members]
    return {name: torch.stack([g[name].double() for g in by_rank]).mean(0) for name in shapes}
