# SPDX-License-Identifier: BSD-3-Clause
"""Training without a task: every gradient is chosen by the test, so that every output is known.

What crosses a process border is numpy or bytes: torch hands tensors over by shared memory, which is
gone when the rank that made them has ended.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp

Tensors = dict[str, torch.Tensor]
Shapes = Mapping[str, Sequence[int]]

# A convolution, a wide, a tall matrix; then what is sent raw: a bias, a matrix too small to pay.
SHAPES: dict[str, tuple[int, ...]] = {
    "conv": (16, 3, 5, 5),
    "wide": (12, 41),
    "tall": (50, 9),
    "bias": (16,),
    "small": (3, 4),
}
COMPRESSED = ("conv", "wide", "tall")  # at rank <= 3 and the default min_compression_rate


class Synthetic(torch.nn.Module):
    """Its loss is the sum of parameter * coefficient: each gradient is the coefficient, exactly.

    A parameter that is not among the coefficients is not used. The parameters are used in the order
    of the coefficients, so that their gradients arrive in the reverse of it.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterDict()
        for name, parameter in parameters.items():  # in this order: a dict would be sorted
            self.weights[name] = torch.nn.Parameter(parameter)

    def forward(self, coefficients: Mapping[str, torch.Tensor]) -> torch.Tensor:
        terms = [(self.weights[name] * c).sum().double() for name, c in coefficients.items()]
        return torch.stack(terms).sum()


def make_ddp(
    shapes: Shapes,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    **ddp_arguments: Any,
) -> DistributedDataParallel:
    """A DDP module of zeros."""
    parameters = {
        name: torch.zeros(shape, dtype=dtype, device=device) for name, shape in shapes.items()
    }
    return DistributedDataParallel(Synthetic(parameters), **ddp_arguments)


def make_attached(
    shapes: Shapes,
    options: tp.Options | None = None,
    dtype: torch.dtype = torch.float32,
    **ddp_arguments: Any,
) -> DistributedDataParallel:
    ddp = make_ddp(shapes, dtype, **ddp_arguments)
    tp.attach(ddp, options)
    return ddp


def gradient(
    shape: Sequence[int], *key: object, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Normal numbers that depend on the key alone: each rank can make those of all ranks."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
    return torch.randn(tuple(shape), generator=generator).to(dtype)


def gradients(shapes: Shapes, rank: int, step: int, dtype: torch.dtype = torch.float32) -> Tensors:
    """What `rank` feeds at `step`."""
    return {name: gradient(shape, name, rank, step, dtype=dtype) for name, shape in shapes.items()}


def mean_gradients(
    shapes: Shapes, world_size: int, step: int, dtype: torch.dtype = torch.float32
) -> Tensors:
    """The mean over ranks of `gradients`, in float64."""
    by_rank = [gradients(shapes, rank, step, dtype) for rank in range(world_size)]
    return {name: torch.stack([g[name].double() for g in by_rank]).mean(0) for name in shapes}


def step(ddp: DistributedDataParallel, coefficients: Mapping[str, torch.Tensor]) -> Tensors:
    """One synchronised backward pass; the gradients that it leaves, by name.

    A parameter that DDP left without a gradient is not among them.
    """
    for parameter in ddp.parameters():
        parameter.grad = None
    ddp(coefficients).backward()
    return outputs_of(ddp)


def outputs_of(ddp: DistributedDataParallel) -> Tensors:
    return {
        name: parameter.grad.detach().clone()
        for name, parameter in ddp.module.weights.items()
        if parameter.grad is not None
    }


def residuals_of(ddp: DistributedDataParallel) -> Tensors:
    """The mean residual of each compressed parameter, in float64. Collective."""
    return {
        name.removeprefix("weights."): saved["residual"].double()
        for name, saved in tp.state_dict(ddp)["parameters"].items()
    }


class Ledger:
    """Checks that the sum of outputs + the mean residual = the sum of mean gradients."""

    def __init__(self) -> None:
        self.delivered: Tensors = {}
        self.owed: Tensors = {}

    def add(self, outputs: Mapping[str, torch.Tensor], means: Mapping[str, torch.Tensor]) -> None:
        for total, tensors in ((self.delivered, outputs), (self.owed, means)):
            for name, tensor in tensors.items():
                total[name] = total.get(name, 0) + tensor.double()

    def errors(self, residuals: Mapping[str, torch.Tensor] | None = None) -> dict[str, float]:
        """By parameter, relative to the sum of the mean gradients."""
        found = {}
        for name, owed in self.owed.items():
            delivered = self.delivered[name] + (residuals or {}).get(name, 0)
            found[name] = relative_error(delivered, owed)
        return found


def relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    """In the Frobenius norm. NaN if either is."""
    expected = expected.double()
    return ((value.double() - expected).norm() / expected.norm()).item()


class _ReduceInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, tensors: list, op: Any, results: list) -> Any:
        ctx.tensors, ctx.op, ctx.results = tensors, op, results
        return leaf.sum()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        works = []
        for tensor in ctx.tensors:
            ctx.results.append(tensor.clone())
            works.append(dist.all_reduce(ctx.results[-1], ctx.op, async_op=True))
        for work in works:
            work.wait()
        return torch.zeros(1), None, None, None


def reduce_in_backward(
    tensors: Iterable[torch.Tensor], op: Any = dist.ReduceOp.SUM
) -> list[torch.Tensor]:
    """The all-reduced tensors, all reduced inside one backward pass of autograd, in this order."""
    leaf = torch.zeros(1, requires_grad=True)
    results: list[torch.Tensor] = []
    _ReduceInBackward.apply(leaf, list(tensors), op, results).backward()
    return results


def to_numpy(tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """In float64, which holds every value of the narrower dtypes exactly."""
    return {name: tensor.double().numpy() for name, tensor in tensors.items()}


def to_bytes(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def from_bytes(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)
