# SPDX-License-Identifier: BSD-3-Clause
"""The scope says which all-reduces are compressed, and a block overrides it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Set
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

import torch_powersgd as tp
from support import ranks
from support.backward import SETTLE_PASSES, in_backward
from support.ddp import make_attached, make_ddp, step
from support.groups import compressed_calls, gloo
from support.synthetic import gradient
from support.tensors import same

MIN_NUMEL = 4096
SCOPES = ("backward", "attached", "never")
DDP = {"weight": (60, 80), "bias": (80,)}  # a module with one bucket

Run = Callable[[Callable[[], object]], None]  # calls a function somewhere
Make = Callable[..., torch.Tensor]
SUM, AVG = ReduceOp.SUM, ReduceOp.AVG


def _options_of(scope: str) -> tp.Options:
    return tp.Options.hook_defaults(scope=scope, start_powerSGD_iter=0, min_numel=MIN_NUMEL)


def _flat(rank: int, numel: int = 3 * MIN_NUMEL) -> torch.Tensor:
    """A random flat tensor, which low-rank factors cannot represent exactly."""
    return gradient([numel], "flat", rank)


def _outside(function: Callable[[], object]) -> None:
    function()


def _observe(where: Run, make: Callable[[], torch.Tensor], op: Any = SUM) -> tuple[int, bool]:
    """How many calls the wrapper compressed, and whether the result equals Gloo's bit for bit."""
    if where is in_backward:  # a flat gradient is exact in its first passes, in any scope
        for _ in range(SETTLE_PASSES):
            where(lambda: dist.all_reduce(make(), op))
    tensor, exact, before = make(), make(), compressed_calls()
    dist.all_reduce(exact, op, group=gloo())
    where(lambda: dist.all_reduce(tensor, op))
    return compressed_calls() - before, bool(_dense(tensor).equal(_dense(exact)))


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


def _observe_ddp(rank: int, kind: str, override: str | None) -> tuple[int, bool]:
    """The same for the bucket of a DDP module, in a block of a scope or not."""
    never = tp.Options.hook_defaults(scope="never") if kind == "never" else None
    fed = {name: gradient(shape, name, rank) for name, shape in DDP.items()}
    outputs = []
    for ddp in (
        make_ddp(DDP, process_group=gloo()),
        make_ddp(DDP) if kind == "unattached" else make_attached(DDP, never),
    ):
        for _ in range(SETTLE_PASSES + 1):
            before = compressed_calls()
            with nullcontext() if override is None else tp.scope(override):
                found = step(ddp, fed)
        outputs.append(found.values())
    return compressed_calls() - before, same(*outputs)


def _matrix(rank: int) -> torch.Tensor:
    return _flat(rank).view(128, -1)


def _to(dtype: torch.dtype) -> Make:
    return lambda rank: _flat(rank).mul(100).to(dtype)


# The scopes that compress a gradient, a matrix and nothing; "block" is a block of scope("always").
GRADIENT, MATRIX = {"backward", "block"}, {"block"}
NOTHING: set[str] = set()

# The place of the call, its tensor on a rank, the operation, and the scopes that compress it.
KINDS: dict[str, tuple[Run, Make, object, Set[str]]] = {
    "flat in backward": (in_backward, _flat, SUM, GRADIENT),
    "flat average in backward": (in_backward, _flat, AVG, GRADIENT),
    "flat of min_numel": (in_backward, lambda rank: _flat(rank, MIN_NUMEL), SUM, GRADIENT),
    "flat below min_numel": (in_backward, lambda rank: _flat(rank, MIN_NUMEL - 1), SUM, MATRIX),
    "flat outside of backward": (_outside, _flat, SUM, MATRIX),
    "flat average outside of backward": (_outside, _flat, AVG, MATRIX),
    "matrix in backward": (in_backward, _matrix, SUM, MATRIX),
    "convolution": (_outside, lambda rank: _flat(rank).view(64, -1, 4, 4), SUM, MATRIX),
    "half precision": (in_backward, _to(torch.float16), SUM, GRADIENT),
    "bfloat16": (in_backward, _to(torch.bfloat16), SUM, GRADIENT),
    "double precision": (in_backward, _to(torch.float64), SUM, NOTHING),
    "complex": (in_backward, _to(torch.complex64), SUM, NOTHING),
    "integers": (in_backward, _to(torch.int32), SUM, NOTHING),
    "maximum": (in_backward, _flat, ReduceOp.MAX, NOTHING),
    "product": (in_backward, _flat, ReduceOp.PRODUCT, NOTHING),
    "transposed": (in_backward, lambda rank: _matrix(rank).t(), SUM, NOTHING),
    "every other element": (in_backward, lambda rank: _flat(rank)[::2], SUM, NOTHING),
    "sparse": (in_backward, lambda rank: _matrix(rank).to_sparse(), SUM, NOTHING),
    # SyncBatchNorm reduces this in its backward: the sums of two gradients per channel.
    "batch norm statistics": (in_backward, lambda rank: _flat(rank, 2 * 256), SUM, MATRIX),
    "found_inf": (_outside, lambda rank: torch.tensor([float(rank)]), SUM, NOTHING),
    "loss": (_outside, lambda rank: torch.tensor(1.5 + rank), AVG, NOTHING),
    "clip norms": (_outside, lambda rank: _flat(rank, 8), SUM, NOTHING),
    "counters": (_outside, lambda rank: torch.arange(20_000), SUM, NOTHING),
}


def _observe_kinds(rank: int, in_block: bool) -> dict[str, tuple[int, bool]]:
    """By kind: the compressed calls, and whether the result is exact."""
    found = {}
    for name, (where, make, op, _) in KINDS.items():
        with tp.scope("always") if in_block else nullcontext():
            found[name] = _observe(where, partial(make, rank), op)
    return found


@pytest.mark.parametrize("scope", [*SCOPES, "block"])
def test_table(scope: str) -> None:
    expected = {
        name: (1, False) if scope in scopes else (0, True)
        for name, (_, _, _, scopes) in KINDS.items()
    }
    in_block = scope == "block"
    options = _options_of("never" if in_block else scope)
    assert ranks.run(2, _observe_kinds, in_block, options=options) == [expected] * 2


def test_nothing_is_compressed_alone() -> None:
    (alone,) = ranks.run(1, _observe_kinds, True, options=_options_of("backward"))
    assert alone == dict.fromkeys(KINDS, (0, True))


@pytest.mark.parametrize(
    ("kind", "scope", "block", "compressed"),
    [
        ("attached", "backward", None, True),
        ("attached", "attached", None, True),
        ("attached", "never", None, False),
        ("attached", "backward", "never", False),
        ("attached", "never", "always", True),
        ("never", "backward", None, False),
        ("unattached", "backward", None, True),
        ("unattached", "attached", None, False),
        ("unattached", "never", None, False),
        ("unattached", "backward", "never", False),
        ("unattached", "never", "always", True),
    ],
)
def test_buckets_of_ddp(kind: str, scope: str, block: str | None, compressed: bool) -> None:
    expected = (int(compressed), not compressed)
    assert ranks.run(2, _observe_ddp, kind, block, options=_options_of(scope)) == [expected] * 2


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
    for found in ranks.run(2, _observe_blocks, options=_options_of("backward")):
        assert found == expected


def _observe_blocks(rank: int) -> dict[str, int]:
    """The compressed calls of one _flat tensor, in blocks of several kinds."""
    found: dict[str, int] = {}

    def count(name: str, where: Run = _outside, make: Make = _flat, *args: int) -> None:
        calls, exact = _observe(where, partial(make, *(args or [rank])))
        assert exact == (calls == 0), name
        found[name] = calls

    count("before")
    with tp.scope("always"):
        count("on")
        count("on, in backward", in_backward)
        count("on, small", _outside, _flat, rank, MIN_NUMEL // 2)
        count("on, too small to pay", _outside, _flat, rank, 9)
        count("on, integers", _outside, torch.arange, 20_000)
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
