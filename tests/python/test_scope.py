# SPDX-License-Identifier: BSD-3-Clause
"""Which all-reduces are compressed: the table of scopes, and the override."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import ranks
import torch
import torch.distributed as dist
from synthetic import gradient, make_attached, make_ddp, step
from torch.distributed import ReduceOp

import torch_powersgd as tp

MIN_NUMEL = 4096
SCOPES = ("backward", "attached", "always", "never")
ALL = frozenset(SCOPES)
NOTHING = frozenset()


class _CallInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, leaf, function):
        ctx.function = function
        return leaf.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.function()
        return grad, None


def in_backward(function: Callable[[], None]) -> None:
    """Calls the function while autograd runs backward."""
    _CallInBackward.apply(torch.zeros((), requires_grad=True), function).backward()


def outside(function: Callable[[], None]) -> None:
    function()


def _flat(rank: int, numel: int = 3 * MIN_NUMEL) -> torch.Tensor:
    return gradient([numel], "flat", rank)


# Of each kind: where it is reduced, its tensor on a rank, the op, and the scopes that compress it.
KINDS: dict[str, tuple] = {
    "flat in backward": (in_backward, _flat, ReduceOp.SUM, {"backward", "always"}),
    "flat average in backward": (in_backward, _flat, ReduceOp.AVG, {"backward", "always"}),
    "flat of min_numel in backward": (
        in_backward,
        lambda rank: _flat(rank, MIN_NUMEL),
        ReduceOp.SUM,
        {"backward", "always"},
    ),
    "flat below min_numel in backward": (
        in_backward,
        lambda rank: _flat(rank, MIN_NUMEL - 1),
        ReduceOp.SUM,
        {"always"},
    ),
    "flat outside of backward": (outside, _flat, ReduceOp.SUM, {"always"}),
    "flat average outside of backward": (outside, _flat, ReduceOp.AVG, {"always"}),
    "matrix in backward": (
        in_backward,
        lambda rank: _flat(rank).view(128, -1),
        ReduceOp.SUM,
        {"always"},
    ),
    "convolution outside of backward": (
        outside,
        lambda rank: _flat(rank).view(64, -1, 4, 4),
        ReduceOp.SUM,
        {"always"},
    ),
    "half precision in backward": (
        in_backward,
        lambda rank: _flat(rank).half(),
        ReduceOp.SUM,
        {"backward", "always"},
    ),
    "bfloat16 in backward": (
        in_backward,
        lambda rank: _flat(rank).bfloat16(),
        ReduceOp.SUM,
        {"backward", "always"},
    ),
    "double precision in backward": (
        in_backward,
        lambda rank: _flat(rank).double(),
        ReduceOp.SUM,
        {"backward", "always"},
    ),
    "complex in backward": (
        in_backward,
        lambda rank: torch.complex(_flat(rank), _flat(rank)),
        ReduceOp.SUM,
        NOTHING,
    ),
    "integers in backward": (
        in_backward,
        lambda rank: _flat(rank).mul(100).int(),
        ReduceOp.SUM,
        NOTHING,
    ),
    "maximum in backward": (in_backward, _flat, ReduceOp.MAX, NOTHING),
    "product in backward": (in_backward, _flat, ReduceOp.PRODUCT, NOTHING),
    "transposed in backward": (
        in_backward,
        lambda rank: _flat(rank).view(128, -1).t(),
        ReduceOp.SUM,
        NOTHING,
    ),
    "every other element in backward": (
        in_backward,
        lambda rank: _flat(rank)[::2],
        ReduceOp.SUM,
        NOTHING,
    ),
    "sparse in backward": (
        in_backward,
        lambda rank: _flat(rank).view(128, -1).to_sparse(),
        ReduceOp.SUM,
        NOTHING,
    ),
    # What SyncBatchNorm reduces in its backward: the sums of two gradients per channel.
    "batch norm statistics in backward": (
        in_backward,
        lambda rank: _flat(rank, 2 * 256),
        ReduceOp.SUM,
        {"always"},
    ),
    "found_inf": (outside, lambda rank: torch.tensor([float(rank)]), ReduceOp.SUM, NOTHING),
    "loss": (outside, lambda rank: torch.tensor(1.5 + rank), ReduceOp.AVG, NOTHING),
    "clip norms": (outside, lambda rank: _flat(rank, 8), ReduceOp.SUM, NOTHING),
    "counters": (outside, lambda rank: torch.arange(20_000), ReduceOp.SUM, NOTHING),
}


def _compressed_calls() -> int:
    return tp.stats(residual_norms=False)["compressed_calls"]


def _observe(where: Callable, tensor: torch.Tensor, op: ReduceOp) -> tuple[int, bool]:
    """How many calls the wrapper compressed, and whether it gave the bits that Gloo gives."""
    exact, before = tensor.clone(), _compressed_calls()
    dist.all_reduce(exact, op, group=_gloo())
    where(lambda: dist.all_reduce(tensor, op))
    return _compressed_calls() - before, bool(_dense(tensor).equal(_dense(exact)))


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


_gloo_groups: list[dist.ProcessGroup] = []


def _gloo() -> dist.ProcessGroup:
    if not _gloo_groups:
        _gloo_groups.append(dist.new_group(backend="gloo"))
    return _gloo_groups[0]


def _observe_kinds(rank: int) -> dict[str, tuple[int, bool]]:
    return {
        name: _observe(where, make(rank), op) for name, (where, make, op, _) in KINDS.items()
    }


def _options(scope: str) -> tp.Options:
    return tp.Options(scope=scope, start_powerSGD_iter=0, min_numel=MIN_NUMEL)


@pytest.fixture(scope="module")
def observed():
    """{scope: [{kind: (compressed calls, exact)} of each rank]}"""
    return {scope: ranks.run(2, _observe_kinds, options=_options(scope)) for scope in SCOPES}


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("kind", KINDS)
def test_table(observed, scope, kind):
    compressed = scope in KINDS[kind][3]
    for mine in observed[scope]:
        assert mine[kind] == (int(compressed), not compressed)


def test_nothing_is_compressed_alone():
    (alone,) = ranks.run(1, _observe_kinds, options=_options("always"))
    assert {name: alone[name] for name in KINDS} == dict.fromkeys(KINDS, (0, True))


# Buckets of DDP.

SHAPES = {"weight": (60, 80), "bias": (80,)}


def _observe_ddp(rank: int, make: Callable) -> tuple[int, bool]:
    fed = {name: gradient(shape, name, rank) for name, shape in SHAPES.items()}
    exact = step(make_ddp(SHAPES, process_group=_gloo()), fed)
    ddp, before = make(), _compressed_calls()
    got = step(ddp, fed)
    return _compressed_calls() - before, all(got[name].equal(exact[name]) for name in SHAPES)


def _attached() -> torch.nn.Module:
    return make_attached(SHAPES)


def _attached_never() -> torch.nn.Module:
    return make_attached(SHAPES, tp.Options(scope="never", start_powerSGD_iter=0))


def _unattached() -> torch.nn.Module:
    return make_ddp(SHAPES)


@pytest.mark.parametrize(
    ("make", "scope", "compressed"),
    [
        (_attached, "backward", True),
        (_attached, "attached", True),
        (_attached, "always", True),
        (_attached, "never", False),
        (_attached_never, "backward", False),
        (_unattached, "backward", True),
        (_unattached, "attached", False),
        (_unattached, "always", True),
        (_unattached, "never", False),
    ],
)
def test_buckets_of_ddp(make, scope, compressed):
    expected = (int(compressed), not compressed)
    assert ranks.run(2, _observe_ddp, make, options=_options(scope)) == [expected] * 2


def _observe_coalesced(rank: int) -> tuple[int, bool]:
    tensors = [_flat(rank), _flat(rank).view(128, -1), _flat(rank, 5)]
    exact = [tensor.clone() for tensor in tensors]
    dist.all_reduce_coalesced(exact, group=_gloo())
    in_backward(lambda: dist.all_reduce_coalesced(tensors))
    same = all(a.equal(b) for a, b in zip(tensors, exact, strict=True))
    return _compressed_calls(), same


@pytest.mark.parametrize("scope", SCOPES)
def test_coalesced_is_exact_unless_always(scope):
    expected = (2, False) if scope == "always" else (0, True)
    assert ranks.run(2, _observe_coalesced, options=_options(scope)) == [expected] * 2


# The override.


def _override(rank: int) -> dict[str, int]:
    """Compressed calls of one flat tensor, under overrides of several kinds."""
    found: dict[str, int] = {}

    def count(name: str, where: Callable = outside, tensor: torch.Tensor | None = None) -> None:
        given = _flat(rank) if tensor is None else tensor
        calls, exact = _observe(where, given, ReduceOp.SUM)
        assert exact == (calls == 0), name
        found[name] = calls

    count("before")
    with tp.compression(True):
        count("on")
        count("on, in backward", in_backward)
        count("on, small", tensor=_flat(rank, MIN_NUMEL // 2))
        count("on, too small to pay", tensor=_flat(rank, 9))
        count("on, integers", tensor=torch.arange(20_000))
        with tp.compression(False):
            count("on, off")
            with tp.compression(True):
                count("on, off, on")
            count("on, off again")
        count("on again")
        on_thread = threading.Thread(target=count, args=("on in another thread",))
        on_thread.start()
        on_thread.join()
    count("after")
    with tp.compression(False):
        count("off, in backward", in_backward)

    def enable_inside() -> None:
        with tp.compression(True):
            count("on inside backward")

    def disable_inside() -> None:
        with tp.compression(False):
            count("off inside backward")
        count("after off inside backward")

    in_backward(enable_inside)
    in_backward(disable_inside)
    with pytest.raises(KeyError), tp.compression(True):
        raise KeyError
    count("after an exception")
    return found


@pytest.mark.parametrize("scope", SCOPES)
def test_override(scope):
    default, in_a_backward = int(scope == "always"), int(scope in ("always", "backward"))
    expected = {
        "before": default,
        "on": 1,
        "on, in backward": 1,
        "on, small": 1,
        "on, too small to pay": 0,
        "on, integers": 0,
        "on, off": 0,
        "on, off, on": 1,
        "on, off again": 0,
        "on again": 1,
        "on in another thread": default,
        "after": default,
        "off, in backward": 0,
        "on inside backward": 1,
        "off inside backward": 0,
        "after off inside backward": in_a_backward,
        "after an exception": default,
    }
    for found in ranks.run(2, _override, options=_options(scope)):
        assert found == expected


def _override_around_backward(rank: int, make: Callable, enabled: bool) -> tuple[int, bool]:
    fed = {name: gradient(shape, name, rank) for name, shape in SHAPES.items()}
    exact = step(make_ddp(SHAPES, process_group=_gloo()), fed)
    loss = (ddp := make())(fed)
    with tp.compression(enabled):
        loss.backward()
    got = {name: parameter.grad for name, parameter in ddp.module.weights.items()}
    return _compressed_calls(), all(got[name].equal(exact[name]) for name in SHAPES)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("make", [_attached, _unattached])
@pytest.mark.parametrize("scope", ["backward", "never"])
def test_override_around_backward_of_ddp(scope, make, enabled):
    expected = (int(enabled), not enabled)
    arguments = (_override_around_backward, make, enabled)
    assert ranks.run(2, *arguments, options=_options(scope)) == [expected] * 2
