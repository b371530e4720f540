# SPDX-License-Identifier: BSD-3-Clause
"""What ``Sparse`` sends, by sorting, and the averages of it, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch_powersgd import sparse


def sent_of(numbers: torch.Tensor, density: float) -> torch.Tensor:
    """What is sent of the numbers, with zeros in place of the rest."""
    count = round(sparse.PART * density)
    found = torch.zeros(-(-numbers.numel() // sparse.BLOCK) * sparse.BLOCK, dtype=torch.float64)
    found[: numbers.numel()] = numbers.flatten()
    for block in found.view(-1, sparse.BLOCK):
        parts = block.view(-1, sparse.PART)
        parts[parts.abs() < parts.abs().sort(1).values[:, -count, None]] = 0
        sent = block != 0
        full = sent.sum() == sparse.BLOCK // sparse.PART * count
        least = block[sent].abs().mean() if full else 0
        for of in (block.abs() > least, sent & (block.abs() <= least)):
            block[of] = block[of].sign() * block[of].abs().mean()
    return found[: numbers.numel()].view(numbers.shape)


def mean_of(sent: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of each number over its senders, or over sqrt(W / 2) if they are fewer."""
    senders = torch.stack([numbers != 0 for numbers in sent]).sum(0).double()
    return torch.stack([*sent]).sum(0) / senders.clamp(min=max(1, math.sqrt(len(sent) / 2)))
