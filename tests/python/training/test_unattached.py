# SPDX-License-Identifier: BSD-3-Clause
"""Gradients that nobody has attached: flat tensors in backward, and the buckets of plain DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import torch_powersgd as tp
from support import ranks
from support.call_observer import SETTLE_PASSES
from support.rank_tests import on_ranks
from support.synthetic import (
    TOLERANCE,
    Ledger,
    gradients,
    make_ddp,
    mean_gradients,
    reduce_in_backward,
    step,
)

# A matrix of 32 x 31 and a tail of 8 hold 1000 elements, one of 34 x 33 and a tail of 25 hold 1147.
# Only the order distinguishes the two tensors of one size.
FLAT = {"first": (1000,), "second": (1147,), "third": (1000,)}
# Rank 4 takes 4 of 34 rows' dimensions out of the mean residual at each step without a gradient.
# Only rounding is left after 9 steps.
DRAIN_STEPS = 24
# These gradients add nothing but are not zero: a gradient that is zero on all ranks is not sent.
QUIET = 1e-20


def _options(**fields: Any) -> tp.Options:
    return tp.Options.hook_defaults(matrix_approximation_rank=4, min_numel=500, **fields)


def _check(ledger: Ledger, compressed_errors: dict[str, float]) -> None:
    assert min(compressed_errors.values()) > 0.05, "compression did delay"
    errors = ledger.errors()
    assert max(errors.values()) < TOLERANCE[torch.float32], errors


@pytest.mark.parametrize(
    ("world_size", "op", "warm_start"),
    [(2, dist.ReduceOp.SUM, True), (4, dist.ReduceOp.AVG, False)],
    ids=["SUM", "AVG, cold"],
)
@on_ranks(backend=None)
def test_flat_tensors_deliver_everything_in_the_end(
    rank: int, world_size: int, op: Any, warm_start: bool
) -> None:
    ranks.init_group("cpu:powersgd", _options(start_powerSGD_iter=0, warm_start=warm_start))
    ledger = Ledger()
    scale = world_size if op == dist.ReduceOp.SUM else 1
    for i in range(8 + DRAIN_STEPS):
        quiet = QUIET if i >= 8 else 1
        mine, means = gradients(FLAT, rank, i), mean_gradients(FLAT, world_size, i)
        outputs = reduce_in_backward([quiet * mine[name] for name in FLAT], op)
        ledger.add(
            dict(zip(FLAT, outputs, strict=True)),
            {name: quiet * scale * mean for name, mean in means.items()},
        )
        if i == 7:
            before_drain = ledger.errors()
    _check(ledger, before_drain)
    stats = tp.stats()
    assert stats["steps"] == 8 + DRAIN_STEPS
    assert stats["compressed_calls"] == len(FLAT) * (8 + DRAIN_STEPS - SETTLE_PASSES)


SHAPES = {"a": (40, 30), "bias": (30,), "b": (25, 36), "c": (17, 19)}
USED_IN_ORDER = {name: SHAPES[name] for name in ("b", "a", "c", "bias")}


@pytest.mark.parametrize(
    ("start", "ddp_arguments"), [(0, {}), (1, {"static_graph": True}), (4, {})], ids=str
)
@on_ranks(backend=None)
def test_ddp_delivers_everything_across_the_rebuild(
    rank: int, start: int, ddp_arguments: dict[str, Any]
) -> None:
    # DDP reorders its bucket by the arrival of the gradients, before the second step, or the third
    # with a static graph. The residual of the first layout must not reach the wrong elements of the
    # next.
    ranks.init_group("cpu:powersgd", _options(start_powerSGD_iter=start))
    ddp, ledger = make_ddp(SHAPES, **ddp_arguments), Ledger()
    for i in range(6 + DRAIN_STEPS):
        quiet = QUIET if i >= 6 else 1
        mine, means = gradients(USED_IN_ORDER, rank, i), mean_gradients(SHAPES, 2, i)
        ledger.add(
            step(ddp, {name: quiet * g for name, g in mine.items()}),
            {name: quiet * mean for name, mean in means.items()},
        )
        if i == 5:
            before_drain = ledger.errors()
    _check(ledger, before_drain)
