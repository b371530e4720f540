# SPDX-License-Identifier: BSD-3-Clause
"""Attached DDP in all its modes: the layout of its buckets must not matter."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

import torch_powersgd as tp
from support.ddp import make_attached, make_compressed, make_ddp, outputs_of, step
from support.groups import gloo
from support.ledger import Ledger, residuals_of
from support.on_ranks import on_ranks
from support.synthetic import SHAPES, gradients, mean_gradients
from support.tensors import Shapes, Tensors, same, sum_of

OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=0, matrix_approximation_rank=2)
# The parameters are used in another order than they are registered in. DDP's rebuilt buckets then
# hold them in another order than the first buckets.
USED_IN_ORDER = {name: SHAPES[name] for name in ("bias", "wide", "small", "conv", "tall")}

VARIANTS: dict[str, dict[str, Any]] = {
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "static_graph": {"static_graph": True},
    "find_unused_parameters": {"find_unused_parameters": True},
    "rebuilt_small_buckets": {"bucket_cap_mb": 1e-3},
    "rebuilt_views": {"bucket_cap_mb": 1e-3, "gradient_as_bucket_view": True},
    "static_small_buckets": {"bucket_cap_mb": 1e-3, "static_graph": True},
    "unused_small_buckets": {"bucket_cap_mb": 1e-3, "find_unused_parameters": True},
}


@pytest.mark.parametrize("name", VARIANTS)
@on_ranks(2)
def test_variants_give_the_same_bits(rank: int, name: str) -> None:
    # The state belongs to the parameter, and every order of summation to its shape. The sum of two
    # ranks is the same in any payload.
    plain = make_attached(SHAPES, OPTIONS)
    variant, compression = make_compressed(SHAPES, OPTIONS, **VARIANTS[name])
    ledger, calls = Ledger(), [0]
    for i in range(6):
        mine = gradients(USED_IN_ORDER, rank, i)
        expected, outputs = step(plain, mine), step(variant, mine)
        assert same(outputs.values(), expected.values()), i
        ledger.add(outputs, mean_gradients(SHAPES, 2, i))
        stats = compression.stats()
        calls.append(stats["compressed_calls"] + stats["exact_calls"])
    ledger.check(compression)
    if "bucket_cap_mb" in VARIANTS[name]:
        assert calls[6] - calls[5] > 2  # several buckets a step
    if name.startswith("rebuilt"):
        assert calls[1] == 1  # the first layout had one bucket


def _exact_steps(
    rank: int, shapes: Shapes, options: tp.Options, zero: bool = False, **ddp_arguments: Any
) -> list[bool]:
    """For each of six steps, whether the bits are those of plain DDP over Gloo."""
    plain = make_ddp(shapes, process_group=gloo(), **ddp_arguments)
    attached = make_attached(shapes, options, **ddp_arguments)
    found = []
    for i in range(6):
        for ddp in (plain, attached):
            ddp.zero_grad(set_to_none=not zero)
            ddp(gradients(shapes, rank, i)).backward()
        found.append(same(outputs_of(plain).values(), outputs_of(attached).values()))
    return found


@pytest.mark.parametrize(
    ("world_size", "views", "zero"),
    # Three ranks show a difference that two do not: a division by 2 is exact in any form. DDP
    # multiplies by a third, as this project does. But DDP divides gradients that stay in their
    # bucket between steps (zeroed views). It does not agree with itself there, and no test can
    # demand agreement.
    [(2, True, True), (3, False, False), (3, False, True), (3, True, False)],
)
@on_ranks()
def test_warm_up_is_exact(rank: int, world_size: int, views: bool, zero: bool) -> None:
    options = replace(OPTIONS, start_powerSGD_iter=4)
    exact = _exact_steps(rank, SHAPES, options, zero, gradient_as_bucket_view=views)
    assert exact == [True] * 4 + [False] * 2
    stats = tp.stats()
    assert (stats["steps"], stats["exact_calls"], stats["compressed_calls"]) == (6, 4, 2)


@on_ranks(3)
def test_a_model_without_anything_to_compress_is_exact(rank: int) -> None:
    shapes = {"bias": (300,), "norm": (64,), "small": (3, 4)}
    assert _exact_steps(rank, shapes, OPTIONS) == [True] * 6
    stats = tp.stats()
    assert (stats["compressed_calls"], stats["ratio"]) == (0, 1)


@on_ranks(1)
def test_one_rank_has_nothing_to_send(rank: int) -> None:
    ddp, compression = make_compressed(SHAPES, OPTIONS)
    for i in range(3):
        mine = gradients(SHAPES, rank, i)
        assert same(step(ddp, mine).values(), mine.values())
    assert not any(residual.any() for residual in residuals_of(compression).values())
    assert str(compression) == "Compression over 1 process, which has nothing to send\n  step 3"
    for counts in (compression.stats(), tp.stats()):
        assert counts["steps"] == 3
        assert not any(counts[n] for n in ("compressed_calls", "bytes_before", "bytes_after"))


def _sums(parts: list[Tensors]) -> Tensors:
    return {name: sum_of(part[name] for part in parts) for name in SHAPES}


@pytest.mark.parametrize(
    ("views", "wire"), [(False, None), (True, None), (False, "int8"), (True, "int4")]
)
@on_ranks(2)
def test_micro_batches_are_the_whole_batch(rank: int, views: bool, wire: str | None) -> None:
    # The bits are equal, so each synchronization applies the residual once, and to the sum.
    options = replace(OPTIONS, start_powerSGD_iter=1, wire_dtype=wire)
    models = [make_compressed(SHAPES, options, gradient_as_bucket_view=views) for _ in range(2)]
    for i in range(6):
        # Integers, whose sums have no rounding, in whatever order they are added.
        parts = [
            {name: (16 * g).round() for name, g in gradients(SHAPES, rank, 4 * i + k).items()}
            for k in range(4)
        ]
        for (ddp, _), batches in zip(models, (parts, [_sums(parts)]), strict=True):
            ddp.zero_grad(set_to_none=not views)
            for batch in batches:
                with ddp.no_sync() if batch is not batches[-1] else nullcontext():
                    ddp(batch).backward()
        assert same(*(outputs_of(ddp).values() for ddp, _ in models)), i
    micro, whole = (residuals_of(compression) for _, compression in models)
    assert same(micro.values(), whole.values())
    assert [compression.stats()["steps"] for _, compression in models] == [6, 6]


@on_ranks(2)
def test_accumulation_that_is_always_synchronized_loses_nothing(rank: int) -> None:
    """Without no_sync each pass reduces the sum that .grad then holds."""
    ddp, compression = make_compressed(SHAPES, OPTIONS)
    ledger = Ledger()
    for i in range(0, 12, 3):
        ddp.zero_grad()
        for k in range(3):
            ddp(gradients(SHAPES, rank, i + k)).backward()
        ledger.add(outputs_of(ddp), _sums([mean_gradients(SHAPES, 2, i + k) for k in range(3)]))
    ledger.check(compression)
    assert compression.stats()["steps"] == 12
