# SPDX-License-Identifier: BSD-3-Clause
"""Small models that do what real ones do, trained in pairs. Each case returns its rank's facts."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from support.paired_training import Facts, TrainingPair, train
from support.synthetic import gradient

CASES: dict[str, Callable[[int], Facts]] = {}


def case(function: Callable[[int], Facts]) -> Callable[[int], Facts]:
    CASES[function.__name__] = function
    return function


def _vectors(rank: int, i: int, *shape: int) -> torch.Tensor:
    return gradient(shape, "input", rank, i).requires_grad_()


def _square(forward, rank, i):
    x = _vectors(rank, i, 8, 24)
    return forward(x).square().mean(), [x]


class Blocks(nn.Module):
    """Two blocks that may be recomputed in backward; with dropout, which must repeat itself."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Dropout(0.2), nn.Linear(48, 24))
        self.second = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24))

    def forward(self, x):
        for block in (self.first, self.second, self.first):  # the first one's weights are shared
            recompute = self.reentrant is not None
            x = checkpoint(block, x, use_reentrant=self.reentrant) if recompute else block(x)
        return x


@case
def static_graph(rank):
    return train(TrainingPair(lambda _: Blocks(None), static_graph=True), _square, rank)


@case
def static_graph_small_buckets(rank):
    pair = TrainingPair(lambda _: Blocks(None), static_graph=True, bucket_cap_mb=1e-3)
    return train(pair, _square, rank)


@case
def checkpointing(rank):
    return train(TrainingPair(lambda _: Blocks(False), bucket_cap_mb=1e-3), _square, rank)


@case
def checkpointing_reentrant(rank):
    # torch: a reentrant backward and a parameter used twice need a static graph.
    return train(TrainingPair(lambda _: Blocks(True), static_graph=True), _square, rank)


@case
def clipping(rank):
    return train(TrainingPair(lambda _: Blocks(None)), _square, rank, clip=0.01)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(24, 20 + k) for k in range(4))

    def forward(self, x, used):
        return torch.cat([self.branches[k](x) for k in used], 1)


@case
def unused_set_changes(rank):
    """Ranks use different branches, some nobody; one is frozen after five steps."""
    # A rank whose loss reached no parameter at all would make plain DDP wait for it, too.
    used = [((0, 1), (0, 2)), ((0, 1, 3), (1,)), ((2, 0), (2, 3)), ((1,), (1, 0))]

    def loss_of(forward, rank, i):
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

    def forward(self, x):
        return self.fp64(self.bf16(self.fp32(x).bfloat16()).double())


@case
def mixed_dtypes(rank):
    return train(TrainingPair(lambda _: Dtypes()), _square, rank)


class Tied(nn.Module):
    """A language model's ends: the embedding's weights are the output layer's."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 24, sparse=sparse)
        self.hidden = nn.Linear(24, 24)
        self.output = nn.Linear(24, 40, bias=False)
        if not sparse:
            self.output.weight = self.embedding.weight

    def forward(self, tokens):
        return self.output(torch.tanh(self.hidden(self.embedding(tokens))))


def _next_token(forward, rank, i):
    tokens = torch.randint(40, (4, 9))
    logits = forward(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()), []


@case
def shared_parameters(rank):
    return train(TrainingPair(lambda _: Tied()), _next_token, rank)


@case
def sparse_gradients(rank):
    # DDP gives a parameter with sparse gradients a bucket of its own, which is never compressed.
    return train(TrainingPair(lambda _: Tied(sparse=True)), _next_token, rank)


class Images(nn.Module):
    """Convolutions with batch norm, a frozen layer and buffers, one of them large."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 12, 3, groups=2),
            nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 24, 1), nn.Flatten(), nn.Linear(384, 10),
        )  # fmt: skip
        self.layers[0].requires_grad_(False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(1 << 18))  # more than min_numel

    def forward(self, x):
        self.seen += len(x)
        self.average.lerp_(x.detach().mean().expand_as(self.average), 0.1)
        return self.layers(x)


def _images(forward, rank, i):
    x = gradient((6, 3, 8, 8), "image", rank, i).to(memory_format=torch.channels_last)
    x.requires_grad_()
    labels = torch.randint(10, (6,))
    return F.cross_entropy(forward(x), labels), [x]


@case
def channels_last_and_buffers(rank):
    return train(
        TrainingPair(lambda _: Images().to(memory_format=torch.channels_last)), _images, rank
    )


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        dist.all_reduce(total := x.clone(), group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        dist.all_reduce(total := gradient.clone(), group=ctx.group)
        return total, None


class SyncedNorm(nn.Module):
    """What torch.nn.SyncBatchNorm, which runs on a GPU only, computes and communicates.

    Its statistics are all-reduced in forward, and their gradients inside of backward.
    """

    def __init__(self, features: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.ones(features)),
            nn.Parameter(torch.zeros(features)),
        )
        self.register_buffer("running_mean", torch.zeros(features))
        self.group = group

    def forward(self, x):
        totals = torch.cat([x.sum(0), x.square().sum(0)])
        totals = _SumOverRanks.apply(totals, self.group)
        mean, square = (totals / (len(x) * self.group.size())).chunk(2)
        self.running_mean.lerp_(mean.detach(), 0.1)
        return (x - mean) * torch.rsqrt(square - mean.square() + 1e-5) * self.weight + self.bias


@case
def synced_batch_norm(rank):
    def make(group):
        return nn.Sequential(
            nn.Linear(24, 32), SyncedNorm(32, group), nn.Tanh(), nn.Linear(32, 24),
            SyncedNorm(24, group),
        )  # fmt: skip

    def loss_of(forward, rank, i):
        x = _vectors(rank, i, 8, 24)
        return (forward(x) * gradient((8, 24), "coefficients", rank)).sum(), [x]

    return train(TrainingPair(make), loss_of, rank)
