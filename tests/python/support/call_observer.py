# SPDX-License-Identifier: BSD-3-Clause
"""Observes whether an all-reduce was compressed, by the call counter and by its result."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

import torch_powersgd as tp
from support.synthetic import gradient, make_attached, make_ddp

MIN_NUMEL = 4096
SETTLE_PASSES = 2  # DDP may still rebuild its buckets in these passes
SCOPES = ("backward", "attached", "never")

SHAPES = {"weight": (60, 80), "bias": (80,)}  # of a DDP module with one bucket

Run = Callable[[Callable[[], object]], None]  # calls a function somewhere


def options_of(scope: str) -> tp.Options:
    return tp.Options.hook_defaults(scope=scope, start_powerSGD_iter=0, min_numel=MIN_NUMEL)


def flat(rank: int, numel: int = 3 * MIN_NUMEL) -> torch.Tensor:
    """A random flat tensor, which low-rank factors cannot represent exactly."""
    return gradient([numel], "flat", rank)


def exception_of(work: dist.Work, otherwise: object) -> object:
    """work.exception(), or ``otherwise`` where torch (2.11) cannot convert it for Python."""
    try:
        return work.exception()
    except TypeError:
        return otherwise


class _CallInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, function: Callable[[], object]) -> torch.Tensor:
        ctx.function = function
        return leaf.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.function()
        return grad, None


def in_backward(function: Callable[[], object]) -> None:
    """Calls the function while autograd runs backward."""
    leaf = torch.zeros((), requires_grad=True)
    _CallInBackward.apply(leaf, function).backward()  # type: ignore[no-untyped-call]


def outside(function: Callable[[], object]) -> None:
    function()


def compressed_calls() -> int:
    calls: int = tp.stats()["compressed_calls"]
    return calls


_gloo_groups: list[dist.ProcessGroup] = []


def gloo() -> dist.ProcessGroup:
    """An uncompressed group of all ranks. The first call is collective."""
    if not _gloo_groups:
        _gloo_groups.append(dist.new_group(backend="gloo"))
    return _gloo_groups[0]


def observe(
    where: Run, make: Callable[[], torch.Tensor], op: Any = dist.ReduceOp.SUM
) -> tuple[int, bool]:
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


def attached() -> torch.nn.Module:
    return make_attached(SHAPES)


def attached_with_scope_never() -> torch.nn.Module:
    return make_attached(SHAPES, tp.Options.hook_defaults(scope="never", start_powerSGD_iter=0))


def unattached() -> torch.nn.Module:
    return make_ddp(SHAPES)


def observe_ddp(
    rank: int, make: Callable[[], torch.nn.Module], override: str | None = None
) -> tuple[int, bool]:
    """The same for the bucket of a DDP module.

    Args:
        override: the scope of a context around backward; None: no context.
    """
    fed = {name: gradient(shape, name, rank) for name, shape in SHAPES.items()}
    gradients: list[list[torch.Tensor]] = []
    for ddp in (make_ddp(SHAPES, process_group=gloo()), make()):
        for _ in range(SETTLE_PASSES + 1):
            ddp.zero_grad()
            loss = ddp(fed)
            before = compressed_calls()
            with nullcontext() if override is None else tp.scope(override):
                loss.backward()
        gradients.append([p.grad for p in ddp.parameters() if p.grad is not None])
    same = all(a.equal(b) for a, b in zip(*gradients, strict=True))
    return compressed_calls() - before, same
