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
from support.ledger import TOLERANCE, Ledger
from support.models import Blocks, Branches, Dtypes, Images, OddShapes, Spectral, SyncedNorm, Tied
from support.on_ranks import all_agree, on_ranks
from support.paired_training import OPTIONS, STEPS, WARM_UP, Backward, ddp_pair
from support.synthetic import gradient
from support.tensors import same

# Each output in bfloat16 is rounded once.
TOLERANCES = {
    "fp64.weight": TOLERANCE[torch.float64],
    "precise": TOLERANCE[torch.float64],
    "bf16.weight": STEPS / 4 * 2**-9,
}

Passed = list[torch.Tensor | None]  # what a backward pass returns: see Backward


def _square(forward: Callable[[torch.Tensor], torch.Tensor], i: int) -> Passed:
    x = gradient((8, 24), "input", dist.get_rank(), i).requires_grad_()
    loss = forward(x).square().mean()
    loss.backward()
    return [loss, x.grad]


def _next_token(ddp: Any, i: int) -> Passed:
    tokens = torch.randint(40, (4, 9))
    loss = F.cross_entropy(ddp(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return [loss]


def _classes(ddp: Any, i: int) -> Passed:
    x = gradient((6, 3, 8, 8), "image", dist.get_rank(), i).to(memory_format=torch.channels_last)
    loss = F.cross_entropy(ddp(x.requires_grad_()), torch.randint(10, (6,)))
    loss.backward()
    return [loss, x.grad]


def _channels_last(_: dist.ProcessGroup) -> nn.Module:
    images: Any = Images()  # the type of Module.to lacks memory_format
    module: nn.Module = images.to(memory_format=torch.channels_last)
    return module


def _synced_norms(group: dist.ProcessGroup) -> nn.Module:
    norms = SyncedNorm(32, group), SyncedNorm(24, group)
    return nn.Sequential(
        nn.Linear(24, 32), norms[0], nn.Tanh(), nn.Linear(32, 24), norms[1], nn.Linear(24, 24)
    )


# What makes the module, the arguments of DDP, and the backward passes of a step. In torch a
# reentrant backward and a parameter used twice need a static graph.
MODELS: dict[str, tuple[Callable[..., nn.Module], dict[str, Any], Backward]] = {
    "static graph": (lambda _: Blocks(), {"static_graph": True}, _square),
    "checkpointing": (lambda _: Blocks(False), {"bucket_cap_mb": 1e-3}, _square),
    "reentrant checkpointing": (lambda _: Blocks(True), {"static_graph": True}, _square),
    "dtypes": (lambda _: Dtypes(), {}, _square),
    "complex parameters": (lambda _: Spectral(), {}, _square),
    "odd shapes": (lambda _: OddShapes(), {}, _square),
    "synced batch norm": (_synced_norms, {}, _square),
    "channels last and buffers": (_channels_last, {}, _classes),
    "shared parameters": (lambda _: Tied(), {}, _next_token),
    # DDP gives a parameter with sparse gradients its own bucket, which is never compressed.
    "sparse gradients": (lambda _: Tied(sparse=True), {}, _next_token),
}


def _train(rank: int, name: str) -> None:
    make, ddp_arguments, backward = MODELS[name]
    pair = ddp_pair(make, **ddp_arguments)
    pair.train(backward)
    pair.check(TOLERANCES)


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    """Sparse gradients are launched once more if a rank dies.

    Plain DDP over Gloo, without this package, dies by a signal in about one of 10 000 backward
    passes with sparse gradients on a busy machine (torch 2.11 to 2.13, AsyncSparseAllreduceWork).
    """
    try:
        ranks.run(2, _train, name, options=OPTIONS)
    except ranks.RankFailed as failure:
        if name != "sparse gradients" or "died with exit code -" not in str(failure):
            raise
        warnings.warn(f"launched once more: {failure}", stacklevel=1)
        ranks.run(2, _train, name, options=OPTIONS)


@pytest.mark.parametrize("autocast", [False, True])
@on_ranks(2, options=OPTIONS)
def test_the_norm_to_clip_by_is_equal_on_all_ranks(rank: int, autocast: bool) -> None:
    pair = ddp_pair(lambda _: Blocks())
    norms = []

    def backward(ddp: nn.Module, i: int) -> Passed:
        def forward(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                output: torch.Tensor = ddp(x)
            return output

        exact = _square(forward, i)
        gradients = [p.grad for p in ddp.parameters() if p.grad is not None]
        norms.append(nn.utils.get_total_norm(gradients).item())
        return exact

    pair.train(backward)
    pair.check()
    assert all_agree(norms)


@on_ranks(2, options=OPTIONS)
def test_unused_set_changes(rank: int) -> None:
    """Ranks use different branches, and no rank uses some. One is frozen after five steps."""
    # Plain DDP, too, would wait for a rank whose loss reached no parameter at all.
    used = [((0, 1), (0, 2)), ((0, 1, 3), (1,)), ((2, 0), (2, 3)), ((1,), (1, 0))]

    def backward(ddp: Any, i: int) -> Passed:
        if i == 5:
            ddp.module.branches[2].requires_grad_(False)
        return _square(lambda x: ddp(x, used[i % 4][rank]), i)

    pair = ddp_pair(lambda _: Branches(), find_unused_parameters=True, bucket_cap_mb=1e-3)
    pair.train(backward, steps=12)
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
