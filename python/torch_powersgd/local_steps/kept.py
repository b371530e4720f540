# SPDX-License-Identifier: BSD-3-Clause
"""What a process keeps of its residual in its parameters after a round of local steps.

The residual is what the process has moved and not yet told the others. If its next local steps
started without it, they might move there again, and it would be delivered twice. How much they do
so shows in the cosine between their change and the residual, which becomes the share to keep:
noise, which isn't moved again, is left out. (CSER, Xie et al., arXiv:2007.13221, keeps all of its
error in the local model.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

# float32 tensors like the parameters, or None for those without a residual
Residuals = Sequence[torch.Tensor | None]


def add(tensors: Sequence[torch.Tensor], residuals: Residuals, factor: float) -> None:
    """Adds a multiple of the residuals to tensors like the parameters."""
    sums, added = _both(tensors, residuals)
    if factor and sums:
        torch._foreach_add_(sums, added, alpha=factor)


def cosine(changes: Sequence[torch.Tensor], residuals: Residuals) -> torch.Tensor:
    """Returns the cosine between changes and the residuals, a tensor of one: NaN if one is zero."""
    moved, held = _both(changes, residuals)
    if not held:
        return torch.full((), torch.nan, device=changes[0].device)
    products = [a.flatten().float().dot(b.flatten()) for a, b in zip(moved, held, strict=True)]
    norms = [torch.stack(torch._foreach_norm(of)).norm() for of in (moved, held)]
    found: torch.Tensor = torch.stack(products).sum() / (norms[0] * norms[1])
    return found


# With ``Sparse``, where a number that one process alone has sent moves the model farther than a
# mean would. With a smaller share, AdamW outruns the rounds; with a larger one, the processes'
# models differ too much.
OF_SPARSE = 0.5


def share(cosine: float, before: float) -> float:
    """Returns the share to keep after a round with this cosine, by that of the round before.

    It falls by half at most. A process that has moved all that its residual holds doesn't move it
    again as long as it is kept.
    """
    return max(cosine, before / 2) if math.isfinite(cosine) else before


def _both(
    tensors: Sequence[torch.Tensor], residuals: Residuals
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    pairs = [(a, b) for a, b in zip(tensors, residuals, strict=True) if b is not None]
    return [a for a, _ in pairs], [b for _, b in pairs]
