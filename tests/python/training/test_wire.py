# SPDX-License-Identifier: BSD-3-Clause
"""Payloads in a narrower dtype: later steps send what a step rounds off."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torch_powersgd as tp
from support import ranks
from support.synthetic import (
    COMPRESSED,
    SHAPES,
    Arrays,
    Ledger,
    Shapes,
    gradients,
    make_attached,
    make_compressed,
    make_ddp,
    mean_gradients,
    relative_error,
    residuals_of,
    step,
    to_numpy,
)

OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=0, matrix_approximation_rank=2)
Wire = torch.dtype | str | None
# The largest error of an element, relative to the largest of its group of 64 elements, and the bits
# of an element with its share of the group's scale.
WIRES: dict[Wire, float] = {
    torch.bfloat16: 2.0**-9,
    torch.float16: 2.0**-12,
    "int8": 1 / 254,
    "int4": 1 / 14,
}
BITS = {torch.bfloat16: 16, torch.float16: 16.25, "int8": 8.25, "int4": 4.25}
STEPS = 12
# The raw segment of this shape is so large that three ranks or more do not gather its payload.
WITH_LARGE = {**SHAPES, "large": (70_000,)}
IDENTITY_TOLERANCE = 1e-5  # as in test_identity: a rank keeps all that it rounds off


def _options(wire: Wire) -> tp.Options:
    return dataclasses.replace(OPTIONS, wire_dtype=wire)


def identity(
    rank: int,
    wire: Wire,
    world_size: int,
    scale: float,
    shapes: Shapes = SHAPES,
    device: str = "cpu",
) -> tuple[dict[str, float], dict[str, Any], list[Arrays]]:
    """Trains and returns the identity's errors, the statistics and the outputs."""
    ddp, compression = make_compressed(shapes, _options(wire), device=device)
    ledger, outputs = Ledger(), []
    for i in range(STEPS):
        mine, mean = gradients(shapes, rank, i), mean_gradients(shapes, world_size, i)
        fed = {name: (tensor * scale).to(device) for name, tensor in mine.items()}
        outputs.append({name: tensor.cpu() for name, tensor in step(ddp, fed).items()})
        ledger.add(outputs[-1], {name: tensor * scale for name, tensor in mean.items()})
    stats = compression.stats()
    residuals = {name: residual.cpu() for name, residual in residuals_of(compression).items()}
    assert residuals.keys() == set(COMPRESSED), "what is not compressed is exact"
    errors = ledger.errors(residuals)
    return errors, stats, [to_numpy(output) for output in outputs]


def _check_identity(results: list[tuple[dict[str, float], dict[str, Any], list[Arrays]]]) -> None:
    for errors, stats, outputs in results:
        assert stats["skipped_steps"] == 0
        assert max(errors.values()) < IDENTITY_TOLERANCE, errors
        for one, other in zip(outputs, results[0][2], strict=True):
            for name in one:
                assert (one[name] == other[name]).all(), "the same on all ranks"


@pytest.mark.parametrize("scale", [2.0**-40, 2.0**40])
@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_identity_at_any_scale(wire: Wire, scale: float) -> None:
    _check_identity(ranks.run(2, identity, wire, 2, scale))


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_identity_in_both_schedules(wire: Wire, world_size: int) -> None:
    _check_identity(ranks.run(world_size, identity, wire, world_size, 1.0, WITH_LARGE))


def _raw_outputs(rank: int, wire: Wire, world_size: int) -> list[tuple[Arrays, Arrays]]:
    """The outputs that are not compressed, beside plain DDP's."""
    ddp = make_attached(WITH_LARGE, _options(wire))
    plain = make_ddp(WITH_LARGE, process_group=dist.new_group(backend="gloo"))
    outputs = []
    for i in range(3):
        mine = gradients(WITH_LARGE, rank, i)
        if world_size > 2:  # sums that are exact in any order
            mine = {name: tensor.mul(16).round() for name, tensor in mine.items()}
        both = step(ddp, mine), step(plain, mine)
        raw = [{n: t for n, t in out.items() if n not in COMPRESSED} for out in both]
        outputs.append((to_numpy(raw[0]), to_numpy(raw[1])))
    return outputs


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("wire", [torch.float32, *WIRES], ids=str)
def test_what_is_not_compressed_has_the_bits_of_plain_ddp(wire: Wire, world_size: int) -> None:
    for outputs in ranks.run(world_size, _raw_outputs, wire, world_size):
        for ours, plain in outputs:
            assert ours.keys() == plain.keys() == {"bias", "small", "large"}
            for name in ours:
                assert (ours[name] == plain[name]).all(), name


def _bytes(rank: int, wire: Wire) -> int:
    ddp = make_attached({"w": (512, 384)}, _options(wire))
    step(ddp, gradients({"w": (512, 384)}, rank, 0))
    sent: int = tp.stats()["bytes_after"]
    return sent


@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_the_bytes_are_those_of_the_wire(wire: Wire) -> None:
    elements = 2 * (512 + 384)  # whole groups
    for sent in ranks.run(2, _bytes, wire):
        # Two flags, and the alignment of two packets to 64 bytes.
        assert 0 <= sent - elements * BITS[wire] / 8 <= 2 + 2 * 64


def _exact_rank(rank: int, wire: Wire) -> float:
    """The relative error of the output, for gradients of rank 1 that all ranks share."""
    ddp = make_attached({"w": (40, 50)}, _options(wire))
    rows, columns = torch.linspace(-1, 1, 40), torch.linspace(1, 2, 50)
    same = torch.outer(rows, columns)
    for _ in range(3):
        output = step(ddp, {"w": same})["w"]
    return relative_error(output, same)


@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_a_gradient_of_low_rank_comes_back(wire: Wire) -> None:
    # P and Q are rounded once each on the way.
    assert max(ranks.run(2, _exact_rank, wire)) < 4 * WIRES[wire]


def _grows(rank: int, wire: Wire, name: str) -> tuple[float, int]:
    """A gradient becomes 2^20 times larger from one step to the next."""
    ddp, compression = make_compressed(SHAPES, _options(wire))
    ledger = Ledger()
    for i in range(8):
        mine, mean = gradients(SHAPES, rank, i), mean_gradients(SHAPES, 2, i)
        if i >= 4:
            mine[name] = mine[name] * 2.0**20
            mean[name] = mean[name] * 2.0**20
        ledger.add(step(ddp, mine), mean)
    return ledger.errors(residuals_of(compression))[name], compression.stats()["skipped_steps"]


@pytest.mark.parametrize("name", ["wide", "bias"])
@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_a_gradient_that_grows_is_in_range(wire: Wire, name: str) -> None:
    for error, skipped in ranks.run(2, _grows, wire, name):
        assert skipped == 0
        assert error < IDENTITY_TOLERANCE


def _large_values(rank: int, wire: Wire) -> list[bool]:
    """Tells which outputs are finite. The gradient of the second step is almost infinite."""
    ddp = make_attached(SHAPES, _options(wire))
    finite = []
    for i in range(4):
        mine = gradients(SHAPES, rank, i)
        if i == 1:
            mine["bias"] = torch.full_like(mine["bias"], 3e38)
            mine["wide"] = torch.full_like(mine["wide"], 3e38)
        finite.append(all(output.isfinite().all() for output in step(ddp, mine).values()))
    assert tp.stats()["skipped_steps"] == 1
    return finite


@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_a_sum_that_overflows_costs_one_step(wire: Wire) -> None:
    assert ranks.run(2, _large_values, wire) == [[True, False, True, True]] * 2


def _float64(rank: int, wire: Wire) -> dict[str, float]:
    ddp, compression = make_compressed(SHAPES, _options(wire), torch.float64)
    ledger = Ledger()
    for i in range(STEPS):
        outputs = step(ddp, gradients(SHAPES, rank, i, torch.float64))
        ledger.add(outputs, mean_gradients(SHAPES, 2, i, torch.float64))
    return ledger.errors(residuals_of(compression))


@pytest.mark.parametrize("wire", [torch.float32, "int8"], ids=str)
def test_identity_of_float64_gradients(wire: Wire) -> None:
    for errors in ranks.run(2, _float64, wire):
        assert max(errors.values()) < 1e-13, errors  # as in test_identity
