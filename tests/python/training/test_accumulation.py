# SPDX-License-Identifier: BSD-3-Clause
"""Gradient accumulation: the outputs of micro-batches are those of the whole batch."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

import torch_powersgd as tp
from support import ranks
from support.synthetic import (
    COMPRESSED,
    SHAPES,
    Arrays,
    Ledger,
    Tensors,
    gradients,
    make_compressed,
    mean_gradients,
    outputs_of,
    residuals_of,
    sum_of,
    to_numpy,
)

OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=1, matrix_approximation_rank=2)
MICRO_BATCHES = 4
STEPS = 6
TOLERANCE = 1e-5  # the identity in float32, as in test_identity


def _integers(rank: int, i: int) -> Tensors:
    """Gradients whose sums have no rounding, in whatever order they are added."""
    return {name: (16 * g).round() for name, g in gradients(SHAPES, rank, i).items()}


def _job(
    rank: int, micro_batches: bool, ddp_arguments: dict[str, Any], wire: str | None = None
) -> tuple[list[Arrays], Arrays, int]:
    ddp, compression = make_compressed(SHAPES, replace(OPTIONS, wire_dtype=wire), **ddp_arguments)
    outputs = []
    for i in range(0, STEPS * MICRO_BATCHES, MICRO_BATCHES):
        parts = [_integers(rank, i + k) for k in range(MICRO_BATCHES)]
        if not micro_batches:
            parts = [{name: sum_of(part[name] for part in parts) for name in SHAPES}]
        ddp.zero_grad(set_to_none=not ddp_arguments)
        for part in parts:
            with ddp.no_sync() if part is not parts[-1] else nullcontext():
                ddp(part).backward()
        outputs.append(to_numpy(outputs_of(ddp)))
    return outputs, to_numpy(residuals_of(compression)), compression.stats()["steps"]


@pytest.mark.parametrize("wire", [None, "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("ddp_arguments", [{}, {"gradient_as_bucket_view": True}], ids=str)
def test_micro_batches_are_the_whole_batch(ddp_arguments: dict[str, Any], wire: str | None) -> None:
    # The bits are equal, so each synchronization applies the residual once, and to the sum.
    micro = ranks.run(2, _job, True, ddp_arguments, wire)
    whole = ranks.run(2, _job, False, ddp_arguments, wire)
    for mine, expected in zip(micro, whole, strict=True):
        assert mine[2] == expected[2] == STEPS
        for i, (output, wanted) in enumerate(zip(mine[0], expected[0], strict=True)):
            for name in SHAPES:
                assert (output[name] == wanted[name]).all(), (i, name)
        for name, residual in mine[1].items():
            assert (residual == expected[1][name]).all()
            assert abs(residual).max() > 0 or name not in COMPRESSED


def _always_synchronized(rank: int) -> tuple[dict[str, float], int]:
    """Trains without no_sync: each pass reduces the sum that .grad then holds."""
    ddp, compression = make_compressed(SHAPES, OPTIONS)
    ledger = Ledger()
    for i in range(0, 12, 3):
        ddp.zero_grad()
        for k in range(3):
            ddp(gradients(SHAPES, rank, i + k)).backward()
        means = [mean_gradients(SHAPES, 2, i + k) for k in range(3)]
        ledger.add(outputs_of(ddp), {name: sum_of(mean[name] for mean in means) for name in SHAPES})
    return ledger.errors(residuals_of(compression)), compression.stats()["steps"]


def test_accumulation_that_is_always_synchronized_loses_nothing() -> None:
    for errors, steps in ranks.run(2, _always_synchronized):
        assert steps == 12
        assert max(errors.values()) < TOLERANCE, errors
