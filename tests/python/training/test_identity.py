# SPDX-License-Identifier: BSD-3-Clause
"""The identity of outputs and residuals, exact gradients of low rank, and bounded residuals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torch_powersgd as tp
from support import ranks
from support.call_observer import SETTLE_PASSES
from support.synthetic import (
    COMPRESSED,
    SHAPES,
    Ledger,
    Tensors,
    gradient,
    gradients,
    make_attached,
    make_compressed,
    make_ddp,
    mean_gradients,
    reduce_in_backward,
    relative_error,
    residuals_of,
    step,
)

# These bound the error of "sum of outputs + mean residual = sum of mean gradients". Each step
# rounds M, the factors and the output once. In float32 that is an error of about 6e-8 * |M|, where
# |M| is a few times the gradient's norm. Some ten steps add such errors at random. The bound for
# float64 is in the same proportion to its rounding.
IDENTITY_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-13}
STEPS = 12
OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=0, matrix_approximation_rank=2)


def _attached(
    rank: int, world_size: int, options: tp.Options, dtype: torch.dtype
) -> tuple[dict[str, float], dict[str, float], dict[str, float], dict[str, Any]]:
    ddp, compression = make_compressed(SHAPES, options, dtype)
    ledger = Ledger()
    for i in range(STEPS):
        outputs = step(ddp, gradients(SHAPES, rank, i, dtype))
        ledger.add(outputs, mean_gradients(SHAPES, world_size, i, dtype))
    residuals = residuals_of(compression)
    sizes = {name: residuals[name].norm().item() for name in residuals}
    return ledger.errors(residuals), ledger.errors(), sizes, compression.stats()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("world_size", "rank"), [(2, 1), (2, 3), (4, 2)])
def test_attached_outputs_and_residual_add_up(
    world_size: int, rank: int, dtype: torch.dtype
) -> None:
    options = replace(OPTIONS, matrix_approximation_rank=rank)
    for errors, without, sizes, stats in ranks.run(
        world_size, _attached, world_size, options, dtype
    ):
        assert set(sizes) == set(COMPRESSED)
        assert max(errors.values()) < IDENTITY_TOLERANCE[dtype], errors
        # Without the residual the identity fails by far, so a missing residual would show.
        assert min(without[name] for name in COMPRESSED) > 0.1, without
        assert stats["steps"] == STEPS
        assert stats["ratio"] > 1.5


@pytest.mark.parametrize("wire", [None, torch.bfloat16, torch.float16, "int8", "int4"], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_attached_identity_of_half_gradients(
    dtype: torch.dtype, wire: torch.dtype | str | None
) -> None:
    # The residual is float32 and is taken before the output is rounded. So only the rounding of the
    # outputs is lost: half a unit in the last place of each of 12 outputs. Together they are less
    # than 12 times the norm of their sum. Rounding is as often up as down, so a quarter of that
    # bound leaves room. A residual in the gradient's dtype would lose as much again at every step.
    options = replace(OPTIONS, wire_dtype=wire)
    for errors, *_ in ranks.run(2, _attached, 2, options, dtype):
        assert max(errors.values()) < STEPS / 4 * torch.finfo(dtype).eps / 2, errors


def _switched_off_now_and_then(rank: int) -> tuple[dict[str, float], float]:
    ddp, compression = make_compressed(SHAPES, OPTIONS)
    ledger = Ledger()
    exact = []
    for i in range(9):
        means = mean_gradients(SHAPES, 2, i)
        if i % 3 == 1:
            with tp.scope("never"):
                outputs = step(ddp, gradients(SHAPES, rank, i))
            exact += [relative_error(outputs[name], means[name]) for name in means]
        else:
            outputs = step(ddp, gradients(SHAPES, rank, i))
        ledger.add(outputs, means)
    return ledger.errors(residuals_of(compression)), max(exact)


def test_exact_steps_between_compressed_ones_keep_the_residual() -> None:
    for errors, exact in ranks.run(2, _switched_off_now_and_then):
        assert exact < 1e-6  # two roundings in float32
        assert max(errors.values()) < IDENTITY_TOLERANCE[torch.float32], errors


# A matrix of 32 x 31 and a tail of 8 hold 1000 elements, one of 34 x 33 and a tail of 25 hold 1147.
# Only the order distinguishes the two tensors of one size.
FLAT = {"first": (1000,), "second": (1147,), "third": (1000,)}
# Rank 4 takes 4 of 34 rows' dimensions out of the mean residual at each step without a gradient.
# Only rounding is left after 9 steps.
DRAIN_STEPS = 24
# These gradients add nothing but are not zero: a gradient that is zero on all ranks is not sent.
QUIET = 1e-20


def _flat(
    rank: int, world_size: int, op: dist.ReduceOp.RedOpType
) -> tuple[dict[str, float], dict[str, float], dict[str, Any]]:
    ledger = Ledger()
    scale = world_size if op == dist.ReduceOp.SUM else 1
    for i in range(8 + DRAIN_STEPS):
        quiet = QUIET if i >= 8 else 1
        mine = gradients(FLAT, rank, i)
        outputs = reduce_in_backward([quiet * mine[name] for name in FLAT], op)
        means = mean_gradients(FLAT, world_size, i)
        ledger.add(
            dict(zip(FLAT, outputs, strict=True)),
            {name: quiet * scale * mean for name, mean in means.items()},
        )
        if i == 7:
            before_drain = ledger.errors()
    return ledger.errors(), before_drain, tp.stats()


@pytest.mark.parametrize("warm_start", [True, False])
@pytest.mark.parametrize(
    ("world_size", "op"), [(2, dist.ReduceOp.SUM), (4, dist.ReduceOp.AVG)], ids=["2-SUM", "4-AVG"]
)
def test_flat_outputs_deliver_everything_in_the_end(
    world_size: int, op: dist.ReduceOp.RedOpType, warm_start: bool
) -> None:
    options = replace(OPTIONS, matrix_approximation_rank=4, min_numel=500, warm_start=warm_start)
    for errors, before_drain, stats in ranks.run(
        world_size, _flat, world_size, op, options=options
    ):
        assert min(before_drain.values()) > 0.1  # compression did delay
        assert max(errors.values()) < 1e-5, errors
        assert stats["steps"] == 8 + DRAIN_STEPS
        assert stats["compressed_calls"] == len(FLAT) * (8 + DRAIN_STEPS - SETTLE_PASSES)


UNATTACHED = {"a": (40, 30), "bias": (30,), "b": (25, 36), "c": (17, 19)}


def _unattached(
    rank: int, forward_order: tuple[str, str, str, str], ddp_arguments: dict[str, Any]
) -> tuple[dict[str, float], dict[str, float]]:
    ddp = make_ddp(UNATTACHED, **ddp_arguments)
    shapes = {name: UNATTACHED[name] for name in forward_order}
    ledger = Ledger()
    for i in range(6 + DRAIN_STEPS):
        quiet = QUIET if i >= 6 else 1
        mine = {name: quiet * g for name, g in gradients(shapes, rank, i).items()}
        outputs = step(ddp, mine)
        means = {name: quiet * g for name, g in mean_gradients(shapes, 2, i).items()}
        ledger.add(outputs, means)
        if i == 5:
            before_drain = ledger.errors()
    return ledger.errors(), before_drain


@pytest.mark.parametrize(
    ("forward_order", "start", "ddp_arguments"),
    [
        (tuple(UNATTACHED), 0, {}),
        (("b", "a", "c", "bias"), 0, {}),
        (("b", "a", "c", "bias"), 1, {"static_graph": True}),
        (("b", "a", "c", "bias"), 4, {}),
    ],
    ids=["registered-0", "mixed-0", "static-1", "mixed-4"],
)
def test_unattached_ddp_delivers_everything_across_the_rebuild(
    forward_order: tuple[str, str, str, str], start: int, ddp_arguments: dict[str, Any]
) -> None:
    # DDP reorders its bucket by the arrival of the gradients, before the second step, or the third
    # with a static graph. The residual of the first layout must not reach the wrong elements of the
    # next.
    options = tp.Options.hook_defaults(
        start_powerSGD_iter=start, matrix_approximation_rank=4, min_numel=500
    )
    for errors, before_drain in ranks.run(
        2, _unattached, forward_order, ddp_arguments, options=options
    ):
        assert min(before_drain.values()) > 0.05, before_drain
        assert max(errors.values()) < 1e-5, errors


LOW_RANK = {"square": (30, 30), "wide": (14, 70), "tall": (90, 12)}


def _low_rank_gradient(rank: int, true_rank: int, i: int) -> Tensors:
    """Gradients whose mean has exactly this rank: all ranks share the column space."""
    return {
        name: gradient((shape[0], true_rank), name, i) @ gradient((true_rank, shape[1]), name, rank)
        for name, shape in LOW_RANK.items()
    }


def _low_rank(rank: int, true_rank: int, options: tp.Options, constant: bool) -> list[float]:
    ddp = make_attached(LOW_RANK, options)
    errors = []
    for i in range(5):
        by_rank = [_low_rank_gradient(other, true_rank, 0 if constant else i) for other in (0, 1)]
        outputs = step(ddp, by_rank[rank])
        errors.append(
            max(
                relative_error(outputs[name], (by_rank[0][name] + by_rank[1][name]) / 2)
                for name in LOW_RANK
            )
        )
    return errors


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("true_rank", [1, 2, 4])
def test_a_gradient_of_low_rank_comes_back_exactly(true_rank: int, constant: bool) -> None:
    # The gradient's rank may be lower than the factors': the idle columns must not disturb.
    options = replace(OPTIONS, matrix_approximation_rank=4, min_compression_rate=1)
    for errors in ranks.run(2, _low_rank, true_rank, options, constant):
        assert max(errors[1:]) < 1e-5, errors


def _constant(rank: int) -> dict[int, float]:
    shapes = {"w": (24, 36)}
    ddp = make_attached(shapes, OPTIONS)
    mean = mean_gradients(shapes, 2, 0)["w"]
    total, errors = torch.zeros(24, 36, dtype=torch.float64), {}
    for i in range(1, 241):
        total += step(ddp, gradients(shapes, rank, 0))["w"].double()
        errors[i] = relative_error(total / i, mean)
    return errors


def test_a_constant_gradient_converges_to_itself() -> None:
    # The mean output differs from G by the mean residual / steps. The residual is bounded: each of
    # the 24 dimensions is sent about every 24 / 2 steps, and twice that leaves room. So the error
    # falls as 1 / steps.
    for errors in ranks.run(2, _constant):
        for i in (60, 120, 240):
            assert errors[i] < 2 * 12 / i, (i, errors[i])


def _non_iid(rank: int, steps: int) -> list[float]:
    shapes = {"w": (16, 40)}
    ddp, compression = make_compressed(shapes, OPTIONS)
    # The ranks' gradients differ from the mean by 5 times its size, always in the same direction. A
    # little noise reaches every dimension.
    mean = gradient((16, 40), "mean")
    apart = 5 * gradient((16, 40), "apart") * (1 if rank == 0 else -1)
    ratios = []
    for i in range(steps):
        mine = mean + apart + 0.3 * gradient((16, 40), "noise", rank, i)
        step(ddp, {"w": mine})
        ratios.append(compression.stats()["residual_norms"]["weights.w"] / mine.norm().item())
    return ratios


def test_the_residual_stays_bounded_on_unlike_data() -> None:
    # Each of 16 dimensions is sent about every 16 / 2 steps and gathers a gradient meanwhile,
    # whatever the number of steps. Twice that is the bound. The second half of the run must not
    # exceed the first by more than chance. A residual of the average, as in torch's hook, never
    # loses the difference of the ranks. It grows by one gradient a step, here to some 300.
    for ratios in ranks.run(2, _non_iid, 300):
        first, second = max(ratios[50:175]), max(ratios[175:])
        assert max(ratios) < 2 * 16 / 2, max(ratios)
        assert second < 1.2 * first, (first, second)
        assert min(ratios[10:]) > 0.1  # there is a residual to be bounded


def _quadratic(rank: int, dtype: torch.dtype, steps: int) -> tuple[float, float]:
    """Runs noisy SGD on the mean over ranks of |x - c_rank|^2 / 2.

    Returns:
        |x - mean c| at the beginning and at the end.
    """
    shapes = {"w": (16, 40)}
    ddp = make_attached(shapes, OPTIONS, dtype)
    optimum = gradient((16, 40), "optimum")
    center = optimum + 5 * gradient((16, 40), "apart") * (1 if rank == 0 else -1)
    x = torch.zeros(16, 40)
    errors = []
    for i in range(steps):
        noisy = x - center + 0.5 * gradient((16, 40), "noise", rank, i)
        x -= 0.05 * step(ddp, {"w": noisy.to(dtype)})["w"].float()
        errors.append((x - optimum).norm().item())
    return errors[0], sum(errors[-50:]) / 50


def test_bfloat16_gradients_train_as_well_as_float32() -> None:
    # The ranks' gradients differ by far more than their mean. A residual in half precision, or a
    # residual of the average, loses the mean there. The error may be twice that of float32.
    first, last = ranks.run(2, _quadratic, torch.float32, 400)[0]
    _, last_half = ranks.run(2, _quadratic, torch.bfloat16, 400)[0]
    assert last < first / 10
    assert last_half < 2 * last, (last_half, last)
