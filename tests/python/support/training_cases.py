# SPDX-License-Identifier: BSD-3-Clause
"""Small models with the features of real ones, trained in pairs. A case returns a rank's facts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from support.paired_training import Facts, TrainingPair, train
from support.synthetic import gradient

# The loss of a step and the inputs of its forward pass.
Step = tuple[torch.Tensor, list[torch.Tensor]]

CASES: dict[str, Callable[[int], Facts]] = {}


def case(function: Callable[[int], Facts]) -> Callable[[int], Facts]:
    CASES[function.__name__] = function
    return function


def _vectors(rank: int, i: int, *shape: int) -> torch.Tensor:
    return gradient(shape, "input", rank, i).requires_grad_()


def _square(forward: Any, rank: int, i: int) -> Step:
    x = _vectors(rank, i, 8, 24)
    return forward(x).square().mean(), [x]


class Blocks(nn.Module):
    """Two blocks that backward may compute again, with dropout, which must then repeat itself."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Dropout(0.2), nn.Linear(48, 24))
        self.second = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (self.first, self.second, self.first):  # the first one's weights are shared
            recompute = self.reentrant is not None
            x = checkpoint(block, x, use_reentrant=self.reentrant) if recompute else block(x)
        return x


@case
def static_graph(rank: int) -> Facts:
    return train(TrainingPair(lambda _: Blocks(None), static_graph=True), _square, rank)


@case
def static_graph_small_buckets(rank: int) -> Facts:
    pair = TrainingPair(lambda _: Blocks(None), static_graph=True, bucket_cap_mb=1e-3)
    return train(pair, _square, rank)


@case
def checkpointing(rank: int) -> Facts:
    return train(TrainingPair(lambda _: Blocks(False), bucket_cap_mb=1e-3), _square, rank)


@case
def checkpointing_reentrant(rank: int) -> Facts:
    # In torch a reentrant backward and a parameter used twice need a static graph.
    return train(TrainingPair(lambda _: Blocks(True), static_graph=True), _square, rank)


@case
def clipping(rank: int) -> Facts:
    return train(TrainingPair(lambda _: Blocks(None)), _square, rank, clip=0.01)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(24, 20 + k) for k in range(4))

    def forward(self, x: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        return torch.cat([self.branches[k](x) for k in used], 1)


@case
def unused_set_changes(rank: int) -> Facts:
    """Ranks use different branches, and no rank uses some. One is frozen after five steps."""
    # Plain DDP, too, would wait for a rank whose loss reached no parameter at all.
    used = [((0, 1), (0, 2)), ((0, 1, 3), (1,)), ((2, 0), (2, 3)), ((1,), (1, 0))]

    def loss_of(forward: Any, rank: int, i: int) -> Step:
        if i == 5:
            forward.module.branches[2].requires_grad_(False)
        x = _vectors(rank, i, 8, 24)
        return forward(x, used[i % 4][rank]).square().sum(), [x]

    pair = TrainingPair(lambda _: Branches(), find_unused_parameters=True, bucket_cap_mb=1e-3)
    return train(pair, loss_of, rank, steps=15)


class Dtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fp32 = nn.Linear(24, 30)
        self.bf16 = nn.Linear(30, 28, dtype=torch.bfloat16)
        self.fp64 = nn.Linear(28, 26, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.fp64(self.bf16(self.fp32(x).bfloat16()).double())
        return output


@case
def mixed_dtypes(rank: int) -> Facts:
    return train(TrainingPair(lambda _: Dtypes()), _square, rank)


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


@case
def complex_parameters(rank: int) -> Facts:
    return train(TrainingPair(lambda _: Spectral()), _square, rank)


class OddShapes(nn.Module):
    """Parameters without elements or dimensions, with gaps in memory, and an expanded gradient."""

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


@case
def odd_shapes(rank: int) -> Facts:
    return train(TrainingPair(lambda _: OddShapes()), _square, rank)


class Tied(nn.Module):
    """The ends of a language model: the embedding's weights are the output layer's."""

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


def _next_token(forward: Any, rank: int, i: int) -> Step:
    tokens = torch.randint(40, (4, 9))
    logits = forward(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()), []


@case
def shared_parameters(rank: int) -> Facts:
    return train(TrainingPair(lambda _: Tied()), _next_token, rank)


@case
def sparse_gradients(rank: int) -> Facts:
    # DDP gives a parameter with sparse gradients a bucket of its own, which is never compressed.
    return train(TrainingPair(lambda _: Tied(sparse=True)), _next_token, rank)


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


def _images(forward: Any, rank: int, i: int) -> Step:
    x = gradient((6, 3, 8, 8), "image", rank, i).to(memory_format=torch.channels_last)
    x.requires_grad_()
    labels = torch.randint(10, (6,))
    return F.cross_entropy(forward(x), labels), [x]


@case
def channels_last_and_buffers(rank: int) -> Facts:
    def make(_: dist.ProcessGroup) -> Images:
        images: Any = Images()  # the type of Module.to lacks memory_format
        return cast(Images, images.to(memory_format=torch.channels_last))

    return train(TrainingPair(make), _images, rank)


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
        self.weight, self.bias = (
            nn.Parameter(torch.ones(features)),
            nn.Parameter(torch.zeros(features)),
        )
        self.register_buffer("running_mean", torch.zeros(features))
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        totals = torch.cat([x.sum(0), x.square().sum(0)])
        totals = _SumOverRanks.apply(totals, self.group)  # type: ignore[no-untyped-call]
        mean, square = (totals / (len(x) * self.group.size())).chunk(2)
        self.running_mean.lerp_(mean.detach(), 0.1)
        output: torch.Tensor = (x - mean) * torch.rsqrt(square - mean.square() + 1e-5)
        return output * self.weight + self.bias


@case
def synced_batch_norm(rank: int) -> Facts:
    def make(group: dist.ProcessGroup) -> nn.Module:
        return nn.Sequential(
            nn.Linear(24, 32), SyncedNorm(32, group), nn.Tanh(), nn.Linear(32, 24),
            SyncedNorm(24, group),
        )  # fmt: skip

    def loss_of(forward: Any, rank: int, i: int) -> Step:
        x = _vectors(rank, i, 8, 24)
        return (forward(x) * gradient((8, 24), "coefficients", rank)).sum(), [x]

    return train(TrainingPair(make), loss_of, rank)
