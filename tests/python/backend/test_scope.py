# SPDX-License-Identifier: BSD-3-Clause
"""The scope says which all-reduces are compressed, and a block overrides it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Set
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.distributed import ReduceOp

import torch_powersgd as tp
from support import ranks
from support.call_observer import (
    MIN_NUMEL,
    SCOPES,
    SETTLE_PASSES,
    Run,
    attached,
    attached_with_scope_never,
    flat,
    in_backward,
    observe,
    observe_ddp,
    options_of,
    outside,
    unattached,
)

Make = Callable[..., torch.Tensor]
SUM, AVG = ReduceOp.SUM, ReduceOp.AVG


def _matrix(rank: int) -> torch.Tensor:
    return flat(rank).view(128, -1)


def _to(dtype: torch.dtype) -> Make:
    return lambda rank: flat(rank).mul(100).to(dtype)


# The scopes that compress a gradient, a matrix and nothing; "block" is a block of scope("always").
GRADIENT, MATRIX = {"backward", "block"}, {"block"}
NOTHING: set[str] = set()

# The place of the call, its tensor on a rank, the operation, and the scopes that compress it.
KINDS: dict[str, tuple[Run, Make, object, Set[str]]] = {
    "flat in backward": (in_backward, flat, SUM, GRADIENT),
    "flat average in backward": (in_backward, flat, AVG, GRADIENT),
    "flat of min_numel": (in_backward, lambda rank: flat(rank, MIN_NUMEL), SUM, GRADIENT),
    "flat below min_numel": (in_backward, lambda rank: flat(rank, MIN_NUMEL - 1), SUM, MATRIX),
    "flat outside of backward": (outside, flat, SUM, MATRIX),
    "flat average outside of backward": (outside, flat, AVG, MATRIX),
    "matrix in backward": (in_backward, _matrix, SUM, MATRIX),
    "convolution": (outside, lambda rank: flat(rank).view(64, -1, 4, 4), SUM, MATRIX),
    "half precision": (in_backward, _to(torch.float16), SUM, GRADIENT),
    "bfloat16": (in_backward, _to(torch.bfloat16), SUM, GRADIENT),
    "double precision": (in_backward, _to(torch.float64), SUM, NOTHING),
    "complex": (in_backward, _to(torch.complex64), SUM, NOTHING),
    "integers": (in_backward, _to(torch.int32), SUM, NOTHING),
    "maximum": (in_backward, flat, ReduceOp.MAX, NOTHING),
    "product": (in_backward, flat, ReduceOp.PRODUCT, NOTHING),
    "transposed": (in_backward, lambda rank: _matrix(rank).t(), SUM, NOTHING),
    "every other element": (in_backward, lambda rank: flat(rank)[::2], SUM, NOTHING),
    "sparse": (in_backward, lambda rank: _matrix(rank).to_sparse(), SUM, NOTHING),
    # SyncBatchNorm reduces this in its backward: the sums of two gradients per channel.
    "batch norm statistics": (in_backward, lambda rank: flat(rank, 2 * 256), SUM, MATRIX),
    "found_inf": (outside, lambda rank: torch.tensor([float(rank)]), SUM, NOTHING),
    "loss": (outside, lambda rank: torch.tensor(1.5 + rank), AVG, NOTHING),
    "clip norms": (outside, lambda rank: flat(rank, 8), SUM, NOTHING),
    "counters": (outside, lambda rank: torch.arange(20_000), SUM, NOTHING),
}


def _observe_kinds(rank: int, in_block: bool) -> dict[str, tuple[int, bool]]:
    """By kind: the compressed calls, and whether the result is exact."""
    found = {}
    for name, (where, make, op, _) in KINDS.items():
        with tp.scope("always") if in_block else nullcontext():
            found[name] = observe(where, partial(make, rank), op)
    return found


@pytest.mark.parametrize("scope", [*SCOPES, "block"])
def test_table(scope: str) -> None:
    expected = {
        name: (1, False) if scope in scopes else (0, True)
        for name, (_, _, _, scopes) in KINDS.items()
    }
    in_block = scope == "block"
    options = options_of("never" if in_block else scope)
    assert ranks.run(2, _observe_kinds, in_block, options=options) == [expected] * 2


def test_nothing_is_compressed_alone() -> None:
    (alone,) = ranks.run(1, _observe_kinds, True, options=options_of("backward"))
    assert alone == dict.fromkeys(KINDS, (0, True))


@pytest.mark.parametrize(
    ("make", "scope", "block", "compressed"),
    [
        (attached, "backward", None, True),
        (attached, "attached", None, True),
        (attached, "never", None, False),
        (attached, "backward", "never", False),
        (attached, "never", "always", True),
        (attached_with_scope_never, "backward", None, False),
        (unattached, "backward", None, True),
        (unattached, "attached", None, False),
        (unattached, "never", None, False),
        (unattached, "backward", "never", False),
        (unattached, "never", "always", True),
    ],
)
def test_buckets_of_ddp(
    make: Callable[[], torch.nn.Module], scope: str, block: str | None, compressed: bool
) -> None:
    expected = (int(compressed), not compressed)
    assert ranks.run(2, observe_ddp, make, block, options=options_of(scope)) == [expected] * 2


def test_blocks() -> None:
    expected = {
        "before": 0,
        "on": 1,
        "on, in backward": 1,
        "on, small": 1,
        "on, too small to pay": 0,
        "on, integers": 0,
        "on, off": 0,
        "on, off, on": 1,
        "on, off again": 0,
        "on again": 1,
        "on in another thread": 0,
        "after": 0,
        "off, in backward": 0,
        "on inside backward": 1,
        "off inside backward": 0,
        "after off inside backward": 1,
        "after an exception": 0,
    }
    for found in ranks.run(2, _observe_blocks, options=options_of("backward")):
        assert found == expected


def _observe_blocks(rank: int) -> dict[str, int]:
    """The compressed calls of one flat tensor, in blocks of several kinds."""
    found: dict[str, int] = {}

    def count(name: str, where: Run = outside, make: Make = flat, *args: int) -> None:
        calls, exact = observe(where, partial(make, *(args or [rank])))
        assert exact == (calls == 0), name
        found[name] = calls

    count("before")
    with tp.scope("always"):
        count("on")
        count("on, in backward", in_backward)
        count("on, small", outside, flat, rank, MIN_NUMEL // 2)
        count("on, too small to pay", outside, flat, rank, 9)
        count("on, integers", outside, torch.arange, 20_000)
        with tp.scope("never"):
            count("on, off")
            with tp.scope("always"):
                count("on, off, on")
            count("on, off again")
        count("on again")
        on_thread = threading.Thread(target=count, args=("on in another thread",))
        on_thread.start()
        on_thread.join()
    count("after")
    with tp.scope("never"):
        count("off, in backward", in_backward)

    def enable_inside() -> None:
        with tp.scope("always"):
            count("on inside backward")

    def disable_inside() -> None:
        with tp.scope("never"):
            count("off inside backward")
        count("after off inside backward")

    for _ in range(SETTLE_PASSES + 1):
        in_backward(enable_inside)
    for _ in range(SETTLE_PASSES + 1):
        in_backward(disable_inside)
    with pytest.raises(KeyError), tp.scope("always"):
        raise KeyError
    count("after an exception")
    return found
