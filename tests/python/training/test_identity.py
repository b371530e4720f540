# SPDX-License-Identifier: BSD-3-Clause
"""The identity: the sum of outputs and the mean residual are the sum of mean gradients.

Where there is no handle, which knows the residual, gradients of almost zero drain it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torch_powersgd as tp
from support import ranks
from support.backward import SETTLE_PASSES, reduce_in_backward
from support.ddp import make_attached, make_compressed, make_ddp, step
from support.ledger import TOLERANCE, Ledger, residuals_of
from support.on_ranks import all_agree, on_ranks
from support.synthetic import COMPRESSED, SHAPES, gradient, gradients, mean_gradients
from support.tensors import Shapes, Tensors, digest

STEPS = 12
OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=0, matrix_approximation_rank=2)
WIRES = ("bfloat16", "int8", "int4")
# The raw segment of this shape is so large that three ranks or more do not gather its payload.
WITH_LARGE = {**SHAPES, "large": (70_000,)}


def identity(
    rank: int,
    options: tp.Options,
    scale: float = 1.0,
    growth: float = 1.0,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    shapes: Shapes = WITH_LARGE,
) -> str:
    """Trains with gradients of one scale, to which "wide" is not held in the second half.

    Returns a digest of the outputs.
    """
    # The residual of half gradients is float32 and is taken before the output is rounded. So only
    # the rounding of the outputs is lost: half a unit in the last place of each of 12 outputs.
    # Together they are less than 12 times the norm of their sum. Rounding is as often up as down,
    # so a quarter of that bound leaves room. A residual in the gradient's dtype would lose as much
    # again at every step.
    bound = TOLERANCE.get(dtype, STEPS / 4 * torch.finfo(dtype).eps / 2)
    ddp, compression = make_compressed(shapes, options, dtype, device=device)
    ledger, outputs = Ledger(), list[torch.Tensor]()
    for i in range(STEPS):
        mine = gradients(shapes, rank, i, dtype)
        means = mean_gradients(shapes, dist.get_world_size(), i, dtype)
        scales = dict.fromkeys(shapes, scale)
        scales["wide"] = scale * (growth if i >= STEPS // 2 else 1)
        found = step(ddp, {name: g * scales[name] for name, g in mine.items()})
        outputs += found.values()
        ledger.add(found, {name: mean * scales[name] for name, mean in means.items()})
    ledger.check(compression, bound)
    # Without the residual the identity fails by far, so a missing residual would show.
    compressed = {name for name in shapes if name in COMPRESSED or name not in WITH_LARGE}
    assert min(ledger.errors()[name] for name in compressed) > 0.1
    assert residuals_of(compression).keys() == compressed, "what is not compressed is exact"
    stats = compression.stats()
    assert (stats["steps"], stats["skipped_steps"]) == (STEPS, 0)
    assert stats["compressed_calls"] >= STEPS
    assert all_agree(digest(outputs))
    return digest(outputs)


# Two ranks gather the packets of a wire that rounds. More exchange the large ones two-shot.
SCALES = [(2, 2.0**40, 1), (3, 1, 2.0**20), (4, 2.0**-40, 1)]


@pytest.mark.parametrize(
    ("world_size", "scale", "growth", "fields"),
    [
        (2, 1, 1, {"matrix_approximation_rank": 1}),
        (4, 1, 1, {"matrix_approximation_rank": 3}),
        (2, 1, 1, {"warm_start": False}),
        *((*s, {"wire_dtype": wire}) for s, wire in zip(SCALES, WIRES, strict=True)),
        (*SCALES[0], {"wire_dtype": "int8"}),
    ],
    ids=str,
)
@on_ranks()
def test_outputs_and_residual_add_up(
    rank: int, world_size: int, scale: float, growth: float, fields: dict[str, Any]
) -> None:
    identity(rank, replace(OPTIONS, **fields), scale, growth)


# Both payloads are so large that equal hosts of several ranks sum them in two levels.
WITH_LARGE_Q = {**WITH_LARGE, "long": (8, 22_000)}


def identity_on(hosts: str, rank: int, wire: str | None) -> str:
    os.environ["POWERSGD_HOST"] = hosts[rank]
    ranks.init_group("cpu:powersgd")
    options = replace(OPTIONS, wire_dtype=wire, matrix_approximation_rank=3)
    found = identity(rank, options, shapes=WITH_LARGE_Q)
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize(
    ("world_size", "hosts", "wire"),
    [
        *((4, "0101", wire) for wire in (None, "int4")),
        (6, "001122", None),
        (8, "00001111", "int8"),
    ],
    ids=str,
)
@on_ranks(backend=None)
def test_sums_in_two_levels_add_up(
    rank: int, world_size: int, hosts: str, wire: str | None
) -> None:
    identity_on(hosts, rank, wire)


@on_ranks(4, backend=None)
def test_only_equal_hosts_of_several_ranks_sum_in_two_levels(rank: int) -> None:
    of_one_level = identity_on("0123", rank, "int8")
    assert identity_on("0000", rank, "int8") == of_one_level
    assert identity_on("0111", rank, "int8") == of_one_level
    assert identity_on("0101", rank, "int8") != of_one_level, "hosts round, not ranks"


@pytest.mark.parametrize(
    ("dtype", "wire"),
    [
        (torch.bfloat16, None),
        (torch.bfloat16, "int8"),
        (torch.float16, None),
        (torch.float16, "bfloat16"),
        (torch.float16, "int4"),
    ],
    ids=str,
)
@on_ranks(2)
def test_other_dtypes(rank: int, dtype: torch.dtype, wire: str | None) -> None:
    identity(rank, replace(OPTIONS, wire_dtype=wire), dtype=dtype)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("wire", [None, "int8"])
@on_ranks()
def test_what_is_not_compressed_has_the_bits_of_plain_ddp(
    rank: int, wire: str | None, world_size: int
) -> None:
    attached = make_attached(WITH_LARGE, replace(OPTIONS, wire_dtype=wire))
    plain = make_ddp(WITH_LARGE, process_group=dist.new_group(backend="gloo"))
    for i in range(3):
        # Integers have sums that are exact in any order.
        mine = {n: g.mul(16).round() for n, g in gradients(WITH_LARGE, rank, i).items()}
        ours, expected = step(attached, mine), step(plain, mine)
        for name in ("bias", "small", "large"):
            assert torch.equal(ours[name], expected[name]), (name, i)


@on_ranks(2)
def test_the_residual_stays_bounded_on_unlike_data(rank: int) -> None:
    # Each of 16 dimensions is sent about every 16 / 2 steps and gathers a gradient meanwhile,
    # whatever the number of steps. Twice that is the bound. The second half of the run must not
    # exceed the first by more than chance. A residual of the average, as in torch's hook, never
    # loses the difference of the ranks. It grows by one gradient a step, here to some 120.
    ddp, compression = make_compressed({"w": (16, 40)}, OPTIONS)
    # The ranks' gradients differ from the mean by 5 times its size, always in the same direction. A
    # little noise reaches every dimension.
    mean = gradient((16, 40), "mean")
    apart = 5 * gradient((16, 40), "apart") * (1 if rank == 0 else -1)
    ratios = []
    for i in range(120):
        mine = mean + apart + 0.3 * gradient((16, 40), "noise", rank, i)
        step(ddp, {"w": mine})
        ratios.append(compression.stats()["residual_norms"]["weights.w"] / mine.norm().item())
    assert max(ratios) < 2 * 16 / 2, max(ratios)
    assert max(ratios[70:]) < 1.2 * max(ratios[20:70])
    assert min(ratios[10:]) > 0.1  # there is a residual to be bounded


# Gradients that nobody has attached: flat tensors in backward, and the buckets of plain DDP.

# A matrix of 32 x 31 and a tail of 8 hold 1000 elements, one of 34 x 33 and a tail of 25 hold 1147.
# Only the order distinguishes the two tensors of one size.
FLAT = {"first": (1000,), "second": (1147,), "third": (1000,)}
# Rank 4 takes 4 of 34 rows' dimensions out of the mean residual at each step without a gradient.
# Only rounding is left after 9 steps.
DRAIN_STEPS = 24
# These gradients add nothing but are not zero: a gradient that is zero on all ranks is not sent.
QUIET = 1e-20


def _flat_options(**fields: Any) -> tp.Options:
    return tp.Options.hook_defaults(matrix_approximation_rank=4, min_numel=500, **fields)


def _check_delivery(
    shapes: Shapes, reduce: Callable[[Tensors], Tensors], steps: int, scale: float = 1
) -> None:
    """Reduces gradients for some steps, and then drains what compression has held back."""
    ledger, rank, world_size = Ledger(), dist.get_rank(), dist.get_world_size()
    for i in range(steps + DRAIN_STEPS):
        if i == steps:
            assert min(ledger.errors().values()) > 0.05, "compression did delay"
        quiet = QUIET if i >= steps else 1
        outputs = reduce({name: quiet * g for name, g in gradients(shapes, rank, i).items()})
        means = mean_gradients(shapes, world_size, i)
        ledger.add(outputs, {name: quiet * scale * mean for name, mean in means.items()})
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
    ranks.init_group("cpu:powersgd", _flat_options(start_powerSGD_iter=0, warm_start=warm_start))
    deliver_flat(rank, op)


def deliver_flat(rank: int, op: Any = dist.ReduceOp.SUM, device: str = "cpu") -> None:
    def reduce(mine: Tensors) -> Tensors:
        outputs = reduce_in_backward([tensor.to(device) for tensor in mine.values()], op)
        return {name: out.cpu() for name, out in zip(mine, outputs, strict=True)}

    _check_delivery(FLAT, reduce, 8, dist.get_world_size() if op == dist.ReduceOp.SUM else 1)
    stats = tp.stats()
    assert stats["steps"] == 8 + DRAIN_STEPS
    assert stats["compressed_calls"] == len(FLAT) * (8 + DRAIN_STEPS - SETTLE_PASSES)


UNATTACHED = {"a": (40, 30), "bias": (30,), "b": (25, 36), "c": (17, 19)}
USED_IN_ORDER = {name: UNATTACHED[name] for name in ("b", "a", "c", "bias")}


@pytest.mark.parametrize(
    ("start", "ddp_arguments"), [(0, {}), (1, {"static_graph": True}), (4, {})], ids=str
)
@on_ranks(backend=None)
def test_unattached_ddp_delivers_everything_across_the_rebuild(
    rank: int, start: int, ddp_arguments: dict[str, Any]
) -> None:
    # DDP reorders its bucket by the arrival of the gradients, before the second step, or the third
    # with a static graph. The residual of the first layout must not reach the wrong elements of the
    # next.
    ranks.init_group("cpu:powersgd", _flat_options(start_powerSGD_iter=start))
    _check_delivery(USED_IN_ORDER, partial(step, make_ddp(UNATTACHED, **ddp_arguments)), 6)
