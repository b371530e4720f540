# SPDX-License-Identifier: BSD-3-Clause
"""Several models with buckets of the same size, as the two critics of a CycleGAN."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import torch_powersgd as tp
from support import ranks
from support.ddp import make_ddp, step
from support.ledger import Ledger
from support.log_records import LogRecords
from support.on_ranks import on_ranks
from support.synthetic import gradients, mean_gradients

SHAPES = {"a": (25, 30), "bias": (30,), "b": (25, 20)}
# In steps whose gradients are almost zero, the residual of an earlier step would show.
STEPS, QUIET_STEPS, QUIET = 8, 24, 1e-20


@pytest.mark.parametrize(
    ("count", "start", "ddp_arguments"),
    # start counts the passes of all: two of each model, with a static graph three, since DDP
    # rebuilds its buckets in the one before.
    [(2, 4, {}), (3, 6, {"gradient_as_bucket_view": True}), (2, 6, {"static_graph": True})],
    ids=["two", "three-with-views", "static"],
)
@on_ranks(backend=None)
def test_no_model_gets_the_residual_of_another(
    rank: int, count: int, start: int, ddp_arguments: dict[str, Any]
) -> None:
    """Models train one after the other, of which the last one has no gradient to speak of."""
    options = {"start_powerSGD_iter": start, "matrix_approximation_rank": 4, "min_numel": 500}
    ranks.init_group("cpu:powersgd", tp.Options.hook_defaults(**options))
    warnings = LogRecords(logging.WARNING).seen
    models = [make_ddp(SHAPES, **ddp_arguments) for _ in range(count)]
    ledgers = [Ledger() for _ in models]
    for i in range(STEPS + QUIET_STEPS):
        for k, (ddp, ledger) in enumerate(zip(models, ledgers, strict=True)):
            quiet = i >= STEPS or k == count - 1
            scale = QUIET if quiet else 1 + k
            mine, means = gradients(SHAPES, rank, i), mean_gradients(SHAPES, 2, i)
            outputs = step(ddp, {name: scale * g for name, g in mine.items()})
            ledger.add(outputs, {name: scale * g for name, g in means.items()})
            if quiet:
                assert all(output.norm() < 1e-16 for output in outputs.values()), "no residual"
    for ledger in ledgers[:-1]:  # What rank 4 left out is lost, and the user is told.
        assert max(ledger.errors().values()) > 0.01
    assert sum("take turns" in message for _, message in warnings) == int(rank == 0)
