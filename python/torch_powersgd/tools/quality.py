# SPDX-License-Identifier: BSD-3-Clause
"""The error of compressed gradients in a user's own steps, for ``advise``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from torch_powersgd.options import Options
from torch_powersgd.tools.footprint import as_reals
from torch_powersgd.tools.shadow_compressors import Comparison

LEARNING_RATE = 1e-3


def errors_of_training(
    model: torch.nn.Module,
    step: Callable[[torch.nn.Module], object],
    options: Sequence[Options],
    device: torch.device,
    steps: int,
) -> list[float]:
    """Trains the model exactly, with AdamW, and returns the error of each setting. Collective.

    Args:
        model: the model, whose weights change.
        step: a function of the model that runs one forward and one backward pass.
        options: the settings.
        device: the device that trains.
        steps: the number of steps.
    """
    group = dist.group.WORLD
    assert group is not None
    model.to(device)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    comparison = Comparison(parameters, options, group)
    buckets = _of_one_dtype(comparison.parameters)
    optimizer = torch.optim.AdamW(comparison.parameters, LEARNING_RATE)
    for _ in range(steps):
        optimizer.zero_grad()
        step(model)
        for bucket, places in enumerate(buckets):
            with _flat_gradients([comparison.parameters[i] for i in places]) as buffer:
                comparison.average(bucket, buffer, places)
        comparison.end_step()
        optimizer.step()
    errors = comparison.errors()
    comparison.close()
    return errors


def _of_one_dtype(parameters: Sequence[torch.Tensor]) -> list[list[int]]:
    """The places of the parameters, in lists of one dtype each."""
    places: dict[torch.dtype, list[int]] = {}
    for i, parameter in enumerate(parameters):
        places.setdefault(parameter.dtype, []).append(i)
    return list(places.values())


@contextlib.contextmanager
def _flat_gradients(parameters: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The gradients one after the other. What the block makes of them becomes the gradients."""
    for parameter in parameters:
        # In the parameter's own order in memory, as DDP has them, whatever backward() has left.
        own = torch.zeros_like(parameter)
        parameter.grad = own if parameter.grad is None else own.copy_(parameter.grad)
    reals = [as_reals(p.grad) for p in parameters if p.grad is not None]
    flat = [gradient.as_strided((gradient.numel(),), (1,)) for gradient in reals]
    buffer = torch.cat(flat)
    yield buffer
    for gradient, average in zip(flat, buffer.split([g.numel() for g in flat]), strict=True):
        gradient.copy_(average)
