# SPDX-License-Identifier: BSD-3-Clause
"""Two models that train against each other: several backward passes, through each other."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from support.paired_training import OPTIONS, STEPS, WARM_UP, ddp_pair, same
from support.rank_tests import on_ranks
from support.synthetic import TOLERANCE, Ledger, gradient


def _layers(*sizes: Any) -> nn.Sequential:
    pairs = zip(sizes[:-1], sizes[1:], strict=True)
    return nn.Sequential(*(layer for a, b in pairs for layer in (nn.Linear(a, b), nn.Tanh())))


@pytest.mark.parametrize("careful", [True, False])
@on_ranks(2, options=OPTIONS)
def test_gan(rank: int, careful: bool) -> None:
    """Trains both. Without care the generator's pass reduces the discriminator's gradients too."""
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
