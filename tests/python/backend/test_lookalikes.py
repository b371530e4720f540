# SPDX-License-Identifier: BSD-3-Clause
"""Several models with buckets of the same size, as the two critics of a CycleGAN."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import torch_powersgd as tp
from support import ranks
from support.log_records import LogRecords
from support.synthetic import Ledger, gradients, make_ddp, mean_gradients, step

SHAPES = {"a": (25, 30), "bias": (30,), "b": (25, 20)}
# As in test_identity, rank 4 drains the mean residual of a near-square matrix of 35 rows. That
# takes 9 steps whose gradients are almost zero.
STEPS, DRAIN_STEPS, QUIET = 8, 24, 1e-20
TOLERANCE = 1e-5


def _train(
    rank: int, count: int, attached: bool, ddp_arguments: dict[str, Any]
) -> tuple[list[float], list[float], list[str]]:
    """Models that train one after the other, of which the last one has no gradient to speak of.

    Returns the error of what each other model got in all, the norm of what each model got in the
    drain steps, and the warnings.
    """
    warnings = LogRecords(logging.WARNING).seen
    models = [make_ddp(SHAPES, **ddp_arguments) for _ in range(count)]
    if attached:
        for ddp in models:
            tp.attach(ddp)
    ledgers = [Ledger() for _ in models]
    drained = [0.0] * count
    for i in range(STEPS + DRAIN_STEPS):
        for k, (ddp, ledger) in enumerate(zip(models, ledgers, strict=True)):
            scale = QUIET if i >= STEPS or k == count - 1 else 1 + k
            mine, means = gradients(SHAPES, rank, i), mean_gradients(SHAPES, 2, i)
            outputs = step(ddp, {name: scale * g for name, g in mine.items()})
            ledger.add(outputs, {name: scale * g for name, g in means.items()})
            if i >= STEPS or k == count - 1:
                drained[k] += sum(output.norm().item() for output in outputs.values())
    errors = [max(ledger.errors().values()) for ledger in ledgers[:-1]]
    return errors, drained, [message for _, message in warnings if "take turns" in message]


@pytest.mark.parametrize(
    ("count", "start", "ddp_arguments"),
    [(2, 4, {}), (3, 6, {"gradient_as_bucket_view": True}), (2, 6, {"static_graph": True})],
    ids=["two", "three-with-views", "static"],
)
def test_no_model_gets_the_residual_of_another(
    count: int, start: int, ddp_arguments: dict[str, Any]
) -> None:
    # start counts the passes of all: two of each model, with a static graph three, since DDP
    # rebuilds its buckets in the one before.
    options = tp.Options.hook_defaults(
        start_powerSGD_iter=start, matrix_approximation_rank=4, min_numel=500
    )
    for errors, drained, warnings in ranks.run(
        2, _train, count, False, ddp_arguments, options=options
    ):
        assert max(drained) < 1e-15  # no residual at all
        assert min(errors) > 0.01  # so that what rank 4 left out is lost, and the user is told:
        assert len(warnings) == 1


def test_an_attached_model_keeps_its_residual() -> None:
    options = tp.Options.hook_defaults(start_powerSGD_iter=4, matrix_approximation_rank=4)
    for errors, drained, warnings in ranks.run(2, _train, 2, True, {}, options=options):
        assert max(errors) < TOLERANCE
        assert drained[0] > 0.01
        assert drained[-1] < 1e-15
        assert warnings == []
