# SPDX-License-Identifier: BSD-3-Clause
"""The features of real training jobs with DDP, in small models: compression harms none of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from support import ranks
from support.models import Blocks, Branches, Dtypes, Images, OddShapes, Spectral, SyncedNorm, Tied
from support.paired_training import OPTIONS, STEPS, WARM_UP, ddp_pair, same
from support.rank_tests import all_agree, on_ranks
from support.synthetic import TOLERANCE, Ledger, gradient

# Each output in bfloat16 is rounded once.
TOLERANCES = {
    "fp64.weight": TOLERANCE[torch.float64],
    "precise": TOLERANCE[torch.float64],
    "bf16.weight": STEPS / 4 * 2**-9,
}

Passed = list[torch.Tensor | None]  # what a backward pass returns: see paired_training


def _inputs(i: int) -> torch.Tensor:
    return gradient((8, 24), "input", dist.get_rank(), i).requires_grad_()


def _square(forward: Callable[[torch.Tensor], torch.Tensor], i: int) -> Passed:
    x = _inputs(i)
    loss = forward(x).square().mean()
    loss.backward()
    return [loss, x.grad]


# In torch a reentrant backward and a parameter used twice need a static graph.
MODELS: dict[str, tuple[Callable[..., nn.Module], dict[str, Any]]] = {
    "static graph": (lambda _: Blocks(), {"static_graph": True}),
    "static graph, small buckets": (
        lambda _: Blocks(),
        {"static_graph": True, "bucket_cap_mb": 1e-3},
    ),
    "checkpointing": (lambda _: Blocks(False), {"bucket_cap_mb": 1e-3}),
    "reentrant checkpointing": (lambda _: Blocks(True), {"static_graph": True}),
    "dtypes": (lambda _: Dtypes(), {}),
    "complex": (lambda _: Spectral(), {}),
    "odd shapes": (lambda _: OddShapes(), {}),
}


@pytest.mark.parametrize("name", MODELS)
@on_ranks(2, options=OPTIONS)
def test_models(rank: int, name: str) -> None:
    make, ddp_arguments = MODELS[name]
    pair = ddp_pair(make, **ddp_arguments)
    pair.train(_square)
    pair.check(TOLERANCES)


@pytest.mark.parametrize("autocast", [False, True])
@on_ranks(2, options=OPTIONS)
def test_clipping(rank: int, autocast: bool) -> None:
    """The averaged gradient is clipped, by the same norm on all ranks, with autocast as without."""
    pair = ddp_pair(lambda _: Blocks())
    norms = []

    def clipped(ddp: nn.Module, i: int) -> Passed:
        def forward(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                output: torch.Tensor = ddp(x)
            return output

        loss, of_input = _square(forward, i)
        norms.append(nn.utils.clip_grad_norm_(ddp.parameters(), 0.01).item())
        return [loss, of_input]

    pair.train(clipped)
    assert min(norms) > 0.01, "there is something to clip"
    assert all_agree(norms)


@on_ranks(2, options=OPTIONS)
def test_unused_set_changes(rank: int) -> None:
    """Ranks use different branches, and no rank uses some. One is frozen after five steps."""
    # Plain DDP, too, would wait for a rank whose loss reached no parameter at all.
    used = [((0, 1), (0, 2)), ((0, 1, 3), (1,)), ((2, 0), (2, 3)), ((1,), (1, 0))]

    def backward(ddp: Any, i: int) -> Passed:
        if i == 5:
            ddp.module.branches[2].requires_grad_(False)
        return _square(lambda x: ddp(x, used[i % 4][rank]) * 4, i)

    pair = ddp_pair(lambda _: Branches(), find_unused_parameters=True, bucket_cap_mb=1e-3)
    pair.train(backward, steps=15)
    pair.check()


def _next_token(forward: Callable[[torch.Tensor], torch.Tensor], i: int) -> Passed:
    tokens = torch.randint(40, (4, 9))
    loss = F.cross_entropy(forward(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return [loss]


def _language_model(rank: int, sparse: bool) -> None:
    pair = ddp_pair(lambda _: Tied(sparse))
    pair.train(_next_token)
    pair.check()


def test_shared_parameters() -> None:
    ranks.run(2, _language_model, False, options=OPTIONS)


def test_sparse_gradients() -> None:
    """DDP gives a parameter with sparse gradients its own bucket, which is never compressed.

    Plain DDP over Gloo, without this package, dies by a signal in about one of 10 000 backward
    passes with sparse gradients on a busy machine (torch 2.11 to 2.13, AsyncSparseAllreduceWork).
    So they are launched once more if a rank dies.
    """
    try:
        ranks.run(2, _language_model, True, options=OPTIONS)
    except ranks.RankFailed as failure:
        if "died with exit code -" not in str(failure):
            raise
        warnings.warn(f"launched once more: {failure}", stacklevel=1)
        ranks.run(2, _language_model, True, options=OPTIONS)


@on_ranks(2, options=OPTIONS)
def test_channels_last_and_buffers(rank: int) -> None:
    def make(_: dist.ProcessGroup) -> nn.Module:
        images: Any = Images()  # the type of Module.to lacks memory_format
        module: nn.Module = images.to(memory_format=torch.channels_last)
        return module

    def backward(ddp: Any, i: int) -> Passed:
        x = gradient((6, 3, 8, 8), "image", rank, i).to(memory_format=torch.channels_last)
        x.requires_grad_()
        loss = F.cross_entropy(ddp(x), torch.randint(10, (6,)))
        loss.backward()
        return [loss, x.grad]

    pair = ddp_pair(make)
    pair.train(backward)
    pair.check()


@on_ranks(2, options=OPTIONS)
def test_synced_batch_norm(rank: int) -> None:
    def make(group: dist.ProcessGroup) -> nn.Module:
        return nn.Sequential(
            nn.Linear(24, 32), SyncedNorm(32, group), nn.Tanh(), nn.Linear(32, 24),
            SyncedNorm(24, group),
        )  # fmt: skip

    def backward(ddp: Any, i: int) -> Passed:
        x = _inputs(i)
        loss = (ddp(x) * gradient((8, 24), "coefficients", rank)).sum()
        loss.backward()
        return [loss, x.grad]

    pair = ddp_pair(make)
    pair.train(backward)
    pair.check()


def _layers(*sizes: Any) -> nn.Sequential:
    pairs = zip(sizes[:-1], sizes[1:], strict=True)
    return nn.Sequential(*(layer for a, b in pairs for layer in (nn.Linear(a, b), nn.Tanh())))


@pytest.mark.parametrize("careful", [True, False])
@on_ranks(2, options=OPTIONS)
def test_gan(rank: int, careful: bool) -> None:
    """Two models that train against each other, with several backward passes, through each other.

    Without care the generator's pass reduces the discriminator's gradients too.
    """
    discriminator = ddp_pair(lambda _: _layers(24, 32, 20, 4))
    generator = ddp_pair(lambda _: _layers(12, 40, 24))
    wanted = Ledger()  # of the gradients that train the discriminator
    kept = []
    for i in range(STEPS):
        noise = gradient((8, 12), "noise", rank, i)
        for pair in (discriminator, generator):
            pair.equalize()
        for d, g in zip(discriminator.modules, generator.modules, strict=True):
            d.zero_grad()
            with d.no_sync():
                (d(gradient((8, 24), "real", rank, i)) - 1).square().mean().backward()
            with torch.no_grad():
                fake = g(noise)
            (d(fake) + 1).square().mean().backward()
        discriminator.record()
        wanted.add(discriminator.gradients(0), discriminator.gradients(1))
        discriminator.descend()
        discriminator.equalize()

        before = discriminator.residuals()
        for d, g in zip(discriminator.modules, generator.modules, strict=True):
            g.zero_grad()
            d.zero_grad()
            with d.no_sync() if careful else nullcontext():
                (d(g(noise)) - 1).square().mean().backward()
        generator.record()
        if not careful:
            discriminator.record()
        kept.append(same(before.values(), discriminator.residuals().values()))
        generator.descend()
    for pair in (discriminator, generator):
        pair.check()
    errors = wanted.errors(discriminator.residuals())
    if careful:
        assert all(kept)
        assert max(errors.values()) < TOLERANCE[torch.float32], errors
    else:
        # The sum of all outputs is right, but a part of it lies in the pass that is thrown away.
        assert not any(kept[WARM_UP:])
        assert max(errors.values()) > 100 * TOLERANCE[torch.float32], errors
