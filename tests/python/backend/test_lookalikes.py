# SPDX-License-Identifier: BSD-3-Clause
"""Several unattached models with buckets of the same size, as the two critics of a CycleGAN."""

from __future__ import annotations

from typing import Any

import pytest

import torch_powersgd as tp
from support import ranks
from support.synthetic import Ledger, gradients, make_ddp, mean_gradients, step

SHAPES = {"a": (25, 30), "bias": (30,), "b": (25, 20)}
# As in test_identity, rank 4 drains the mean residual of a near-square matrix of 35 rows. That
# takes 9 steps whose gradients are almost zero.
STEPS, DRAIN_STEPS, QUIET = 8, 24, 1e-20
TOLERANCE = 1e-5


def _alike(
    rank: int, count: int, ddp_arguments: dict[str, Any]
) -> tuple[list[float], float, float, int]:
    """Models that train one after the other, the first with a gradient and the last without."""
    models = [make_ddp(SHAPES, **ddp_arguments) for _ in range(count)]
    ledgers = [Ledger() for _ in models]
    for i in range(STEPS + DRAIN_STEPS):
        for k, (ddp, ledger) in enumerate(zip(models, ledgers, strict=True)):
            scale = QUIET if i >= STEPS or k == count - 1 else 1 + k
            mine, means = gradients(SHAPES, rank, i), mean_gradients(SHAPES, 2, i)
            outputs = step(ddp, {name: scale * g for name, g in mine.items()})
            ledger.add(outputs, {name: scale * g for name, g in means.items()})
        if i == STEPS - 1:
            delayed = min(ledgers[0].errors().values())
    quiet = max(total.norm().item() for total in ledgers[-1].outputs.values())
    errors = [max(ledger.errors().values()) for ledger in ledgers[:-1]]
    return errors, delayed, quiet, tp.stats()["compressed_calls"]


@pytest.mark.parametrize(
    ("count", "start", "ddp_arguments"),
    [
        (2, 4, {}),
        (2, 11, {}),
        (3, 6, {}),
        (2, 4, {"gradient_as_bucket_view": True}),
        (2, 6, {"static_graph": True}),
    ],
    ids=["two", "two-later", "three", "views", "static"],
)
def test_each_gets_its_own_back(count: int, start: int, ddp_arguments: dict[str, Any]) -> None:
    # The start counts the passes of all models. Each model has two, or three with a static graph,
    # because DDP rebuilds its buckets in the pass before.
    options = tp.Options(start_powerSGD_iter=start, matrix_approximation_rank=4, min_numel=500)
    for errors, delayed, quiet, calls in ranks.run(
        2, _alike, count, ddp_arguments, options=options
    ):
        assert delayed > 0.05
        assert max(errors) < TOLERANCE, errors
        assert quiet < 1e-15  # nothing of the others' residuals
        assert calls > count * DRAIN_STEPS
