# SPDX-License-Identifier: BSD-3-Clause
"""All-reduces that a loop issues while autograd runs backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

SETTLE_PASSES = 2  # DDP may still rebuild its buckets in these passes


class _CallInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, function: Callable[[], object]) -> torch.Tensor:
        ctx.function = function
        return leaf.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.function()
        return grad, None


def in_backward(function: Callable[[], object]) -> None:
    """Calls the function while autograd runs backward."""
    leaf = torch.zeros((), requires_grad=True)
    _CallInBackward.apply(leaf, function).backward()  # type: ignore[no-untyped-call]


def reduce_in_backward(
    tensors: Iterable[torch.Tensor], op: Any = dist.ReduceOp.SUM
) -> list[torch.Tensor]:
    """All-reduces copies of the tensors inside one backward pass of autograd, in this order."""
    results = [tensor.clone() for tensor in tensors]

    def reduce() -> None:
        for work in [dist.all_reduce(result, op, async_op=True) for result in results]:
            work.wait()

    in_backward(reduce)
    return results
