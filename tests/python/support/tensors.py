# SPDX-License-Identifier: BSD-3-Clause
"""Tensors by name, and how they compare."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch

Tensors = dict[str, torch.Tensor]

Shapes = Mapping[str, Sequence[int]]


def same(a: Iterable[torch.Tensor | None], b: Iterable[torch.Tensor | None]) -> bool:
    """True if both hold the same tensors, bit for bit; NaN equals NaN."""
    return all(
        x is y or (x is not None and y is not None and bits(x) == bits(y))
        for x, y in zip(a, b, strict=True)
    )


def digest(tensors: Iterable[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(map(bits, tensors))).hexdigest()


def bits(tensor: torch.Tensor) -> bytes:
    tensor = tensor.detach()
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    return tensor.contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes()


def add_to(totals: Tensors, tensors: Mapping[str, torch.Tensor]) -> None:
    """Adds each tensor to the total with its name, in float64."""
    for name, tensor in tensors.items():
        total = tensor.cpu().double()
        totals[name] = totals[name] + total if name in totals else total


def sum_of(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(tensors)).sum(0)


def relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative error in the Frobenius norm; NaN if either has a NaN, 0 without elements."""
    if value.shape == expected.shape and expected.numel() == 0:
        return 0.0
    expected = expected.double()
    error: float = ((value.double() - expected).norm() / expected.norm()).item()
    return error
