# SPDX-License-Identifier: BSD-3-Clause
"""Training without a task. The test chooses every gradient, so the outputs are known.

Only numpy arrays and bytes are passed between processes. torch passes tensors in shared memory,
which is gone once the process that made them has ended.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp

Tensors = dict[str, torch.Tensor]
Array = npt.NDArray[Any]
Arrays = dict[str, Array]
Shapes = Mapping[str, Sequence[int]]

# A convolution, a wide and a tall matrix; then raw segments: a bias, a matrix too small to pay.
SHAPES: dict[str, tuple[int, ...]] = {
    "conv": (16, 3, 5, 5),
    "wide": (12, 41),
    "tall": (50, 9),
    "bias": (16,),
    "small": (3, 4),
}
COMPRESSED = ("conv", "wide", "tall")  # at rank <= 3 and the default min_compression_rate

# Bounds on the error of "sum of outputs + mean residual = sum of mean gradients". Each step rounds
# M, the factors and the output once. In float32 that is an error of about 6e-8 * |M|, where |M| is
# a few times the gradient's norm. About ten steps add such errors at random. The bound for float64
# is proportional to its rounding error.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-13}


class Synthetic(torch.nn.Module):
    """A module whose loss is the sum of parameter * coefficient: each gradient is its coefficient.

    A parameter that is not among the coefficients is not used. The parameters are used in the order
    of the coefficients, so their gradients arrive in the reverse order.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterDict()
        for name, parameter in parameters.items():  # one by one: ParameterDict sorts a dict
            self.weights[name] = torch.nn.Parameter(parameter)

    def forward(self, coefficients: Mapping[str, torch.Tensor]) -> torch.Tensor:
        terms = [(self.weights[name] * c).sum().real.double() for name, c in coefficients.items()]
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
    options: tp.Options | Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    **ddp_arguments: Any,
) -> DistributedDataParallel:
    """Only the module, for tests that need no handle."""
    return make_compressed(shapes, options, dtype, **ddp_arguments)[0]


def make_compressed(
    shapes: Shapes,
    options: tp.Options | Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    scaler: torch.amp.GradScaler | None = None,
    by_python: bool = False,
    **ddp_arguments: Any,
) -> tuple[DistributedDataParallel, tp.Compression]:
    """An attached DDP module of zeros, and the handle of its compression.

    Args:
        by_python: whether to use the hook in Python.
    """
    ddp = make_ddp(shapes, dtype, **ddp_arguments)
    compression = tp.attach(ddp, options, scaler=scaler, register_hook=not by_python)
    if by_python:
        ddp.register_comm_hook(None, compression.comm_hook)
    return ddp, compression


def gradient(
    shape: Sequence[int], *key: object, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Normal random numbers that only depend on the key: each rank can make those of all ranks."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
    return torch.randn(tuple(shape), generator=generator).to(dtype)


def gradients(
    shapes: Shapes, rank: int, step: object, dtype: torch.dtype = torch.float32
) -> Tensors:
    """The gradients of `rank` at `step`."""
    return {name: gradient(shape, name, rank, step, dtype=dtype) for name, shape in shapes.items()}


def mean_gradients(
    shapes: Shapes, world_size: int, step: int, dtype: torch.dtype = torch.float32
) -> Tensors:
    """The mean over ranks of `gradients`, in float64."""
    by_rank = [gradients(shapes, rank, step, dtype) for rank in range(world_size)]
    return {name: torch.stack([g[name].double() for g in by_rank]).mean(0) for name in shapes}


def step(ddp: DistributedDataParallel, coefficients: Mapping[str, torch.Tensor]) -> Tensors:
    """Runs one synchronized backward pass and returns the gradients that it leaves, by name.

    A parameter that DDP left without a gradient is not among them.
    """
    for parameter in ddp.parameters():
        parameter.grad = None
    ddp(coefficients).backward()
    return outputs_of(ddp)


def train(
    ddp: DistributedDataParallel, steps: Iterable[int], ledger: Ledger | None = None
) -> list[Tensors]:
    """Takes the steps with these numbers, using ``gradients``. Returns their outputs.

    Args:
        ledger: Records the outputs and the mean gradients.
    """
    shapes = {n: weight.shape for n, weight in weights_of(ddp).items() if weight.requires_grad}
    dtype, group = next(ddp.parameters()).dtype, ddp.process_group
    outputs = []
    for i in steps:
        outputs.append(step(ddp, gradients(shapes, group.rank(), i, dtype)))
        if ledger is not None:
            ledger.add(outputs[-1], mean_gradients(shapes, group.size(), i, dtype))
    return outputs


def weights_of(ddp: DistributedDataParallel) -> torch.nn.ParameterDict:
    """The parameters of a DDP module that ``make_ddp`` made, by name."""
    weights = ddp.module.weights
    assert isinstance(weights, torch.nn.ParameterDict)
    return weights


def outputs_of(ddp: DistributedDataParallel) -> Tensors:
    return {
        name: parameter.grad.detach().clone()
        for name, parameter in weights_of(ddp).items()
        if parameter.grad is not None
    }


def residuals_of(compression: tp.Compression) -> Tensors:
    """The mean residual of each compressed parameter, in float64 and without the loss scale.

    Collective.
    """
    state = own_part(compression.state_dict())
    return {
        name.removeprefix("weights."): saved["residual"].cpu().double() / state["grad_scale"]
        for name, saved in state["parameters"].items()
    }


def own_residuals_of(compression: tp.Compression) -> Tensors:
    """This process's residual of each parameter that has one, as [n, m] in float64."""
    saved = own_part(compression.state_dict(per_rank=True))["parameters"]
    return {
        name.removeprefix("weights."): state["memory"].cpu().double()
        - state["p_hat"].cpu().double() @ state["q_local"].cpu().double()
        for name, state in saved.items()
        if state.get("memory") is not None
    }


class Ledger:
    """Checks the identity: the sum of outputs + the mean residual = the sum of mean gradients."""

    def __init__(self) -> None:
        self.outputs: Tensors = {}  # the sums so far, by parameter
        self.means: Tensors = {}

    def add(self, outputs: Mapping[str, torch.Tensor], means: Mapping[str, torch.Tensor]) -> None:
        add_to(self.outputs, outputs)
        add_to(self.means, means)

    def errors(self, residuals: Mapping[str, torch.Tensor] | None = None) -> dict[str, float]:
        """The errors of the identity, relative to the sum of the mean gradients, by parameter."""
        return {
            name: relative_error(self.outputs[name] + (residuals or {}).get(name, 0), mean)
            for name, mean in self.means.items()
        }

    def check(
        self,
        compression: tp.Compression,
        tolerance: float = TOLERANCE[torch.float32],
        **tolerances: float,
    ) -> None:
        """Asserts the identity, with separate tolerances for some parameters. Collective."""
        for name, error in self.errors(residuals_of(compression)).items():
            assert error < tolerances.get(name, tolerance), (name, error)


def add_to(totals: Tensors, tensors: Mapping[str, torch.Tensor]) -> None:
    """Adds each tensor to the total with its name, in float64."""
    for name, tensor in tensors.items():
        total = tensor.cpu().double()
        totals[name] = totals[name] + total if name in totals else total


def sum_of(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(tensors)).sum(0)


def relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative error in the Frobenius norm; NaN if either has a NaN, 0 without elements."""
    if value.shape == expected.shape and expected.numel() == 0:
        return 0.0
    expected = expected.double()
    error: float = ((value.double() - expected).norm() / expected.norm()).item()
    return error


class _ReduceInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, *arguments: Any) -> Any:
        ctx.tensors, ctx.op, ctx.results = arguments
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
    """All-reduces the tensors inside one backward pass of autograd, in this order."""
    leaf = torch.zeros(1, requires_grad=True)
    results: list[torch.Tensor] = []
    total = _ReduceInBackward.apply(leaf, list(tensors), op, results)  # type: ignore[no-untyped-call]
    total.backward()
    return results


def to_numpy(tensors: Mapping[str, torch.Tensor]) -> Arrays:
    """The tensors in float64, which holds every value of the narrower dtypes exactly."""
    return {name: tensor.double().numpy() for name, tensor in tensors.items()}


def to_bytes(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def from_bytes(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def own_part(state: dict[str, Any]) -> dict[str, Any]:
    """This process's part of a state. If there are several, each is under its own key."""
    return state if "version" in state else next(iter(state.values()))


def without_checksums(state: Any) -> Any:
    """The state without its checksums, which would reveal every change."""
    if not isinstance(state, dict):
        return state
    return {key: without_checksums(value) for key, value in state.items() if key != "crc32"}
