# SPDX-License-Identifier: BSD-3-Clause
"""Payloads in a narrower dtype: later steps send the rounding, and overflows do not last."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import torch_powersgd as tp
from support import ranks
from support.synthetic import (
    SHAPES,
    Arrays,
    Ledger,
    gradients,
    make_attached,
    mean_gradients,
    outputs_of,
    relative_error,
    residuals_of,
    step,
    to_numpy,
)

OPTIONS = tp.Options(start_powerSGD_iter=0, matrix_approximation_rank=2)
# The unit roundoff of each.
WIRES = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
STEPS = 12


def _options(wire: torch.dtype | None) -> tp.Options:
    return dataclasses.replace(OPTIONS, wire_dtype=wire)


def identity(
    rank: int,
    wire: torch.dtype | None,
    world_size: int,
    same: bool,
    scale: float,
    device: str = "cpu",
) -> tuple[dict[str, float], dict[str, Any], list[Arrays]]:
    """Trains and returns the identity's errors, the statistics and the outputs.

    Args:
        same: all ranks have the gradients of rank 0.
    """
    ddp = make_attached(SHAPES, _options(wire), device=device)
    ledger, outputs = Ledger(), []
    for i in range(STEPS):
        mine = gradients(SHAPES, 0 if same else rank, i)
        mean = mean_gradients(SHAPES, 1 if same else world_size, i)
        fed = {name: (tensor * scale).to(device) for name, tensor in mine.items()}
        outputs.append({name: tensor.cpu() for name, tensor in step(ddp, fed).items()})
        ledger.add(outputs[-1], {name: tensor * scale for name, tensor in mean.items()})
    stats = tp.stats()
    residuals = {name: residual.cpu() for name, residual in residuals_of(ddp).items()}
    errors = ledger.errors(residuals)
    return errors, stats, [to_numpy(output) for output in outputs]


@pytest.mark.parametrize("scale", [1.0, 2.0**-40, 2.0**40])
@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_what_a_rank_rounds_off_is_part_of_its_residual(wire: torch.dtype, scale: float) -> None:
    # The sum of two equal numbers is exact, so a rank has done all the rounding itself. The
    # identity then holds as closely as in float32. Raw segments are the exception: the ranks keep
    # their last rounding without showing it, that of one gradient among twelve.
    for errors, stats, _ in ranks.run(2, identity, wire, 2, True, scale):
        assert stats["skipped_steps"] == 0
        for name in ("conv", "wide", "tall"):
            assert errors[name] < 1e-5, (name, errors)
        for name in ("bias", "small"):
            assert errors[name] < WIRES[wire], (name, errors)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_identity_within_the_rounding_of_the_sum(wire: torch.dtype, world_size: int) -> None:
    whole = ranks.run(world_size, identity, None, world_size, False, 1.0)
    results = ranks.run(world_size, identity, wire, world_size, False, 1.0)
    for (errors, stats, outputs), (_, in_full, _) in zip(results, whole, strict=True):
        # Each sum is rounded at most world_size - 1 times; the errors of the steps are independent.
        assert max(errors.values()) < 2 * (world_size - 1) * WIRES[wire], errors
        sent = stats["bytes_after"] / in_full["bytes_after"]
        assert sent == 0.5
        for one, other in zip(outputs, results[0][2], strict=True):
            for name in SHAPES:
                assert (one[name] == other[name]).all(), "the same on all ranks"


def _exact_rank(rank: int, wire: torch.dtype) -> float:
    """The relative error of the output, for gradients of rank 1 that all ranks share."""
    ddp = make_attached({"w": (40, 50)}, _options(wire))
    rows, columns = torch.linspace(-1, 1, 40), torch.linspace(1, 2, 50)
    same = torch.outer(rows, columns)
    for _ in range(3):
        output = step(ddp, {"w": same})["w"]
    return relative_error(output, same)


@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_a_gradient_of_low_rank_comes_back(wire: torch.dtype) -> None:
    # P and Q are rounded once each on the way.
    assert max(ranks.run(2, _exact_rank, wire)) < 4 * WIRES[wire]


def _spike(rank: int, name: str) -> tuple[list[int], float, int]:
    """A gradient becomes 2^20 times larger, so that float16 overflows for a few steps."""
    ddp = make_attached(SHAPES, _options(torch.float16))
    ledger, skipped = Ledger(), []
    for i in range(12):
        mine, mean = gradients(SHAPES, rank, i), mean_gradients(SHAPES, 2, i)
        if i >= 4:
            mine[name] = mine[name] * 2.0**20
            mean[name] = mean[name] * 2.0**20
        step(ddp, mine)
        outputs = outputs_of(ddp)
        finite = all(torch.isfinite(output).all() for output in outputs.values())
        if finite:
            ledger.add(outputs, mean)
        else:
            skipped.append(i)
            assert all(torch.isnan(output).all() for output in outputs.values())
    errors = ledger.errors(residuals_of(ddp))
    return skipped, errors[name], tp.stats()["skipped_steps"]


# Each overflow divides the scale by 2^8. Growth of 2^20 with 2^5 of headroom takes two steps. A
# matrix takes two more, because its Q cannot be sent before its P can.
@pytest.mark.parametrize(("name", "lost"), [("wide", 4), ("bias", 2)])
def test_an_overflow_of_float16_costs_a_few_steps_and_nothing_else(name: str, lost: int) -> None:
    for skipped, error, counted in ranks.run(2, _spike, name):
        assert skipped == list(range(4, 4 + lost))
        assert counted == lost
        assert error < 4 * WIRES[torch.float16]
