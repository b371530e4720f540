# SPDX-License-Identifier: BSD-3-Clause
"""The table of scopes says which all-reduces are compressed."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

import torch_powersgd as tp
from support import ranks
from support.call_observer import (
    MIN_NUMEL,
    SCOPES,
    SETTLE_PASSES,
    attached,
    attached_with_scope_never,
    compressed_calls,
    flat,
    gloo,
    in_backward,
    observe,
    observe_ddp,
    options_of,
    outside,
    unattached,
)

NOTHING: frozenset[str] = frozenset()

# The place of the call, its tensor on a rank, the op, and the scopes that compress it.
Kind = tuple[Any, Any, Any, AbstractSet[str]]
KINDS: dict[str, Kind] = {
    "flat in backward": (in_backward, flat, ReduceOp.SUM, {"backward", "always"}),
    "flat average in backward": (in_backward, flat, ReduceOp.AVG, {"backward", "always"}),
    "flat of min_numel in backward": (
        in_backward,
        lambda rank: flat(rank, MIN_NUMEL),
        ReduceOp.SUM,
        {"backward", "always"},
    ),
    "flat below min_numel in backward": (
        in_backward,
        lambda rank: flat(rank, MIN_NUMEL - 1),
        ReduceOp.SUM,
        {"always"},
    ),
    "flat outside of backward": (outside, flat, ReduceOp.SUM, {"always"}),
    "flat average outside of backward": (outside, flat, ReduceOp.AVG, {"always"}),
    "matrix in backward": (
        in_backward,
        lambda rank: flat(rank).view(128, -1),
        ReduceOp.SUM,
        {"always"},
    ),
    "convolution outside of backward": (
        outside,
        lambda rank: flat(rank).view(64, -1, 4, 4),
        ReduceOp.SUM,
        {"always"},
    ),
    "half precision in backward": (
        in_backward,
        lambda rank: flat(rank).half(),
        ReduceOp.SUM,
        {"backward", "always"},
    ),
    "bfloat16 in backward": (
        in_backward,
        lambda rank: flat(rank).bfloat16(),
        ReduceOp.SUM,
        {"backward", "always"},
    ),
    "double precision in backward": (
        in_backward,
        lambda rank: flat(rank).double(),
        ReduceOp.SUM,
        {"backward", "always"},
    ),
    "complex in backward": (
        in_backward,
        lambda rank: torch.complex(flat(rank), flat(rank)),
        ReduceOp.SUM,
        NOTHING,
    ),
    "integers in backward": (
        in_backward,
        lambda rank: flat(rank).mul(100).int(),
        ReduceOp.SUM,
        NOTHING,
    ),
    "maximum in backward": (in_backward, flat, ReduceOp.MAX, NOTHING),
    "product in backward": (in_backward, flat, ReduceOp.PRODUCT, NOTHING),
    "transposed in backward": (
        in_backward,
        lambda rank: flat(rank).view(128, -1).t(),
        ReduceOp.SUM,
        NOTHING,
    ),
    "every other element in backward": (
        in_backward,
        lambda rank: flat(rank)[::2],
        ReduceOp.SUM,
        NOTHING,
    ),
    "sparse in backward": (
        in_backward,
        lambda rank: flat(rank).view(128, -1).to_sparse(),
        ReduceOp.SUM,
        NOTHING,
    ),
    # SyncBatchNorm reduces this in its backward: the sums of two gradients per channel.
    "batch norm statistics in backward": (
        in_backward,
        lambda rank: flat(rank, 2 * 256),
        ReduceOp.SUM,
        {"always"},
    ),
    "found_inf": (outside, lambda rank: torch.tensor([float(rank)]), ReduceOp.SUM, NOTHING),
    "loss": (outside, lambda rank: torch.tensor(1.5 + rank), ReduceOp.AVG, NOTHING),
    "clip norms": (outside, lambda rank: flat(rank, 8), ReduceOp.SUM, NOTHING),
    "counters": (outside, lambda rank: torch.arange(20_000), ReduceOp.SUM, NOTHING),
}


def _observe_kinds(rank: int) -> dict[str, tuple[int, bool]]:
    return {
        name: observe(where, partial(make, rank), op)
        for name, (where, make, op, _) in KINDS.items()
    }


@pytest.fixture(scope="module")
def observed() -> Any:
    """By scope, rank and kind: the compressed calls, and whether the result is exact."""
    return {scope: ranks.run(2, _observe_kinds, options=options_of(scope)) for scope in SCOPES}


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("kind", KINDS)
def test_table(observed: Any, scope: str, kind: str) -> None:
    compressed = scope in KINDS[kind][3]
    for mine in observed[scope]:
        assert mine[kind] == (int(compressed), not compressed)


def test_nothing_is_compressed_alone() -> None:
    (alone,) = ranks.run(1, _observe_kinds, options=options_of("always"))
    assert {name: alone[name] for name in KINDS} == dict.fromkeys(KINDS, (0, True))


@pytest.mark.parametrize(
    ("make", "scope", "compressed"),
    [
        (attached, "backward", True),
        (attached, "attached", True),
        (attached, "always", True),
        (attached, "never", False),
        (attached_with_scope_never, "backward", False),
        (unattached, "backward", True),
        (unattached, "attached", False),
        (unattached, "always", True),
        (unattached, "never", False),
    ],
)
def test_buckets_of_ddp(make: Any, scope: str, compressed: Any) -> None:
    expected = (int(compressed), not compressed)
    assert ranks.run(2, observe_ddp, make, options=options_of(scope)) == [expected] * 2


def _observe_coalesced(rank: int, override: str | None) -> tuple[int, bool]:
    tensors = [flat(rank), flat(rank).view(128, -1), flat(rank, 5)]
    exact = [tensor.clone() for tensor in tensors]
    dist.all_reduce_coalesced(exact, group=gloo())
    with nullcontext() if override is None else tp.scope(override):
        for _ in range(SETTLE_PASSES):
            in_backward(lambda: dist.all_reduce_coalesced([tensor.clone() for tensor in tensors]))
        before = compressed_calls()
        in_backward(lambda: dist.all_reduce_coalesced(tensors))
    same = all(a.equal(b) for a, b in zip(tensors, exact, strict=True))
    return compressed_calls() - before, same


@pytest.mark.parametrize("override", [None, "always", "never"])
@pytest.mark.parametrize("scope", SCOPES)
def test_coalesced_is_exact_unless_always(scope: str, override: Any) -> None:
    compressed = scope == "always" and override != "never"
    expected = (2, False) if compressed else (0, True)
    arguments = (_observe_coalesced, override)
    assert ranks.run(2, *arguments, options=options_of(scope)) == [expected] * 2
