# SPDX-License-Identifier: BSD-3-Clause
"""Sees whether an all-reduce was compressed: by the count of calls, and by its value."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist

import torch_powersgd as tp
from support.synthetic import gradient, make_attached, make_ddp

MIN_NUMEL = 4096
SETTLE_PASSES = 2  # in which DDP may still rebuild its buckets
SCOPES = ("backward", "attached", "always", "never")

SHAPES = {"weight": (60, 80), "bias": (80,)}  # of a DDP module with one bucket


def options_of(scope: str) -> tp.Options:
    return tp.Options(scope=scope, start_powerSGD_iter=0, min_numel=MIN_NUMEL)


def flat(rank: int, numel: int = 3 * MIN_NUMEL) -> torch.Tensor:
    """Random: no low-rank factors hold it exactly."""
    return gradient([numel], "flat", rank)


def exception_of(work: dist.Work, otherwise: object) -> object:
    """work.exception(), or ``otherwise`` where torch (2.11) cannot convert it for Python."""
    try:
        return work.exception()
    except TypeError:
        return otherwise


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


def compressed_calls() -> int:
    return tp.stats(residual_norms=False)["compressed_calls"]


_gloo_groups: list[dist.ProcessGroup] = []


def gloo() -> dist.ProcessGroup:
    """A group of all ranks that is never compressed. To be called first on all ranks alike."""
    if not _gloo_groups:
        _gloo_groups.append(dist.new_group(backend="gloo"))
    return _gloo_groups[0]


def observe(
    where: Callable, make: Callable[[], torch.Tensor], op: dist.ReduceOp = dist.ReduceOp.SUM
) -> tuple[int, bool]:
    """How many calls the wrapper compressed, and whether it gave the bits that Gloo gives."""
    if where is in_backward:  # a flat gradient is exact in its first passes, in any scope
        for _ in range(SETTLE_PASSES):
            where(lambda: dist.all_reduce(make(), op))
    tensor, exact, before = make(), make(), compressed_calls()
    dist.all_reduce(exact, op, group=gloo())
    where(lambda: dist.all_reduce(tensor, op))
    return compressed_calls() - before, bool(_dense(tensor).equal(_dense(exact)))


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


def attached() -> torch.nn.Module:
    return make_attached(SHAPES)


def attached_with_scope_never() -> torch.nn.Module:
    return make_attached(SHAPES, tp.Options(scope="never", start_powerSGD_iter=0))


def unattached() -> torch.nn.Module:
    return make_ddp(SHAPES)


def observe_ddp(
    rank: int, make: Callable[[], torch.nn.Module], override: bool | None = None
) -> tuple[int, bool]:
    """The same of the bucket of a DDP module, its backward inside of an override if not None."""
    fed = {name: gradient(shape, name, rank) for name, shape in SHAPES.items()}
    gradients = []
    for ddp in (make_ddp(SHAPES, process_group=gloo()), make()):
        for _ in range(SETTLE_PASSES + 1):
            ddp.zero_grad()
            loss = ddp(fed)
            before = compressed_calls()
            with nullcontext() if override is None else tp.compression(override):
                loss.backward()
        gradients.append([parameter.grad for parameter in ddp.parameters()])
    same = all(a.equal(b) for a, b in zip(*gradients, strict=True))
    return compressed_calls() - before, same
