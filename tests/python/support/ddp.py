# SPDX-License-Identifier: BSD-3-Clause
"""DDP modules whose gradients the test chooses, and their steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support.ledger import Ledger
from support.synthetic import Synthetic, gradients, mean_gradients
from support.tensors import Shapes, Tensors


def make_ddp(
    shapes: Shapes, dtype: torch.dtype = torch.float32, device: str = "cpu", **ddp_arguments: Any
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


def step(ddp: DistributedDataParallel, coefficients: Mapping[str, torch.Tensor]) -> Tensors:
    """Runs one synchronized backward pass and returns the gradients that it leaves, on the CPU.

    A parameter that DDP left without a gradient is not among them.
    """
    for parameter in ddp.parameters():
        parameter.grad = None
    ddp({name: c.to(parameter.device) for name, c in coefficients.items()}).backward()
    return {name: output.cpu() for name, output in outputs_of(ddp).items()}


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
