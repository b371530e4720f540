# SPDX-License-Identifier: BSD-3-Clause
"""Two models that train against each other: several backward passes, through each other."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from support import ranks
from support.paired_training import OPTIONS, STEPS, WARM_UP, Facts, TrainingPair, descend, same
from support.synthetic import Ledger, gradient

TOLERANCE = 1e-5  # the identity in float32, as in test_identity


def _layers(*sizes: Any) -> torch.nn.Sequential:
    pairs = zip(sizes[:-1], sizes[1:], strict=True)
    return nn.Sequential(*(layer for a, b in pairs for layer in (nn.Linear(a, b), nn.Tanh())))


def _gan(rank: int, careful: bool) -> tuple[Facts, Facts, dict[str, float], list[bool]]:
    """Trains both. Without care the generator's pass reduces the discriminator's gradients too."""
    discriminator = TrainingPair(lambda _: _layers(24, 32, 20, 4))
    generator = TrainingPair(lambda _: _layers(12, 40, 24))
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
        discriminator.record(exact=True)
        found, exact = map(discriminator.gradients, discriminator.modules)
        wanted.add(found, exact)
        for d in discriminator.modules:
            descend(d)
        discriminator.equalize()

        before = discriminator.residuals()
        for d, g in zip(discriminator.modules, generator.modules, strict=True):
            g.zero_grad()
            d.zero_grad()
            with d.no_sync() if careful else nullcontext():
                (d(g(noise)) - 1).square().mean().backward()
        generator.record(exact=True)
        if not careful:
            discriminator.record(exact=True)
        after = discriminator.residuals()
        kept.append(before.keys() == after.keys() and same(before.values(), after.values()))
        for g in generator.modules:
            descend(g)
    errors = wanted.errors(discriminator.residuals())
    return discriminator.finish(), generator.finish(), errors, kept


@pytest.mark.parametrize("careful", [True, False])
def test_gan(careful: bool) -> None:
    results = ranks.run(2, _gan, careful, options=OPTIONS)
    for discriminator, generator, errors, kept in results:
        for facts in (discriminator, generator):
            assert facts.warm_up == [True] * WARM_UP
            assert not any(facts.compressed)
            assert max(facts.errors.values()) < TOLERANCE, facts.errors
        if careful:
            assert all(kept)
            assert errors == discriminator.errors
        else:
            # The sum of all outputs is right, but a part of it lies in the pass that is thrown
            # away.
            assert not any(kept[WARM_UP:])
            assert max(errors.values()) > 100 * TOLERANCE, errors
    for k in (0, 1):
        assert results[0][k].replica == results[1][k].replica
