# SPDX-License-Identifier: BSD-3-Clause
"""Small models with the features of real ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint


class Blocks(nn.Module):
    """Two blocks that backward may recompute, with dropout that must then repeat."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Dropout(0.2), nn.Linear(48, 24))
        self.second = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (self.first, self.second, self.first):  # the first one is used twice
            recompute = self.reentrant is not None
            x = checkpoint(block, x, use_reentrant=self.reentrant) if recompute else block(x)
        return x


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(24, 20 + k) for k in range(4))

    def forward(self, x: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        return torch.cat([self.branches[k](x) for k in used], 1)


class Dtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fp32 = nn.Linear(24, 30)
        self.bf16 = nn.Linear(30, 28, dtype=torch.bfloat16)
        self.fp64 = nn.Linear(28, 26, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.fp64(self.bf16(self.fp32(x).bfloat16()).double())
        return output


class Spectral(nn.Module):
    """A layer of a Fourier neural operator: complex weights, one of them not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(24, 24)
        self.modes = nn.Parameter(0.1 * torch.randn(24, 20, dtype=torch.complex64))
        self.transposed = nn.Parameter(0.1 * torch.randn(18, 20, dtype=torch.complex64).t())
        self.precise = nn.Parameter(0.1 * torch.randn(18, 13, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        modes = self.lift(x).to(torch.complex64) @ self.modes @ self.transposed
        output: torch.Tensor = torch.fft.irfft(modes.to(torch.complex128) @ self.precise)
        return output


class OddShapes(nn.Module):
    """Parameters that are empty, 0-dim or not contiguous, and an expanded gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 20)
        self.scalar = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.zeros(0, 20))
        self.gaps = nn.Parameter(0.1 * torch.randn(20, 56)[:, ::2])
        self.expanded = nn.Parameter(0.1 * torch.randn(18, 25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.cat([self.linear(x) * self.scalar, self.empty])
        return hidden @ self.gaps + self.expanded.mean()


class Tied(nn.Module):
    """The first and last layer of a language model, with tied weights."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 24, sparse=sparse)
        self.hidden = nn.Linear(24, 24)
        self.output = nn.Linear(24, 40, bias=False)
        if not sparse:
            self.output.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.output(torch.tanh(self.hidden(self.embedding(tokens))))
        return logits


class Images(nn.Module):
    """Convolutions with batch norm, a frozen layer and buffers, one of them large."""

    seen: torch.Tensor
    average: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 12, 3, groups=2),
            nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 24, 1), nn.Flatten(), nn.Linear(384, 10),
        )  # fmt: skip
        self.layers[0].requires_grad_(False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(1 << 18))  # more than min_numel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        self.average.lerp_(x.detach().mean().expand_as(self.average), 0.1)
        logits: torch.Tensor = self.layers(x)
        return logits


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        dist.all_reduce(total := x.clone(), group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        dist.all_reduce(total := gradient.clone(), group=ctx.group)
        return total, None


class SyncedNorm(nn.Module):
    """A torch.nn.SyncBatchNorm for the CPU, where torch's own does not run.

    It all-reduces the statistics in forward, and their gradients in backward.
    """

    running_mean: torch.Tensor

    def __init__(self, features: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))
        self.register_buffer("running_mean", torch.zeros(features))
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        totals = torch.cat([x.sum(0), x.square().sum(0)])
        totals = _SumOverRanks.apply(totals, self.group)  # type: ignore[no-untyped-call]
        mean, square = (totals / (len(x) * self.group.size())).chunk(2)
        self.running_mean.lerp_(mean.detach(), 0.1)
        output: torch.Tensor = (x - mean) * torch.rsqrt(square - mean.square() + 1e-5)
        return output * self.weight + self.bias
