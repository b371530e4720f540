# SPDX-License-Identifier: BSD-3-Clause
"""Pairs of modules sharded by FSDP2 (fully_shard): one attached, one with FSDP2's own HSDP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torch_powersgd as tp
from support.meshes import mesh_of
from support.on_ranks import on_ranks
from support.paired_training import OPTIONS, TrainingPair
from support.synthetic import gradient
from torch_powersgd.group_backends import PLAIN_BACKENDS

REPLICAS, SHARDS = 2, 2
WORLD_SIZE = REPLICAS * SHARDS

on_mesh = on_ranks(WORLD_SIZE, backend="gloo")
# Tests modules attached on the shards, and native ones on the whole mesh.
both = pytest.mark.parametrize("native", [False, True])

# A Net that is an FSDPModule as well: fully_shard changes the class of its argument.
Sharded = Any

# The module names of each unit of a Net, except the last unit, which is the rest. None: the blocks.
Units = Sequence[Sequence[str]] | None


class Net(nn.Module):
    """A net with uneven shards. Only the first rank has an element of ``gain``."""

    def __init__(self, width: int = 25) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.gain = nn.Parameter(torch.ones(1))
        self.out = nn.Linear(width, 33)

    def forward(
        self, x: torch.Tensor, skip: int | None = None, gained: bool = True, headless: bool = False
    ) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            x = x if i == skip else torch.tanh(block(x))
        x = self.gain * x if gained else x
        output: torch.Tensor = x if headless else self.out(x)
        return output


def sharded(
    mesh: DeviceMesh,
    tensor_mesh: DeviceMesh | None = None,
    prepare: Callable[[nn.Module], nn.Module] = lambda block: block,
    units: Units = None,
    **arguments: Any,
) -> Sharded:
    """A net in which each unit of blocks, as returned by ``prepare``, and the rest are sharded."""
    torch.manual_seed(0)
    net = Net()
    if tensor_mesh is not None:
        net = Net(24)  # FSDP2 needs a width that two ranks can split evenly
        parallelize_module(
            net, tensor_mesh, {"blocks.0": ColwiseParallel(), "blocks.1": RowwiseParallel()}
        )
    net.blocks = nn.ModuleList(prepare(block) for block in net.blocks)
    for unit in (["blocks.0"], ["blocks.1"]) if units is None else units:
        fully_shard([net.get_submodule(name) for name in unit], mesh=mesh, **arguments)
    return fully_shard(net, mesh=mesh, **arguments)


def replicas(backend: Any) -> Sharded:
    """A module with a replica on each rank, made by ``replicate()``."""
    mesh = mesh_of(backend, ("shard", 1))["replicate"]
    torch.manual_seed(0)
    net = Net()
    for block in net.blocks:
        replicate(block, mesh=mesh)
    return replicate(net, mesh=mesh)


def make_pair(
    options: tp.Options = OPTIONS,
    native: bool = False,
    scaler: torch.amp.GradScaler | None = None,
    device: str = "cpu",
    **arguments: Any,
) -> TrainingPair:
    """A pair whose first module is attached on its shards or, if native, on the whole mesh."""
    mesh = mesh_of((f"{device}:powersgd", options), device=device)
    attached = sharded(mesh if native else mesh["shard"], **arguments)
    plain = sharded(mesh_of(PLAIN_BACKENDS[device], device=device), **arguments)
    group = None if native else mesh.get_group("replicate")
    return TrainingPair(attached, plain, tp.attach(attached, scaler=scaler, group=group))


def gradients(module: Sharded) -> list[torch.Tensor]:
    """This rank's shards of the gradients."""
    return [p.grad.to_local().clone() for p in module.parameters() if p.grad is not None]


def passes(
    module: Sharded, i: object, rank: int | None = None, scale: float = 1, **arguments: Any
) -> list[torch.Tensor]:
    """Runs a forward and a backward pass of step i, and returns the loss and the input's gradient.

    Args:
        rank: the rank whose input is used, if not this one.
        scale: of the loss.
        arguments: keyword arguments of the net.
    """
    key = dist.get_rank() if rank is None else rank
    weight = module.out.weight
    x = gradient((6, weight.shape[1]), "input", key, i).to(weight.device).requires_grad_()
    loss = module(x, **arguments).square().mean()
    (scale * loss).backward()
    assert x.grad is not None
    return [loss, x.grad]


def step(
    module: Sharded, i: object, rank: int | None = None, **arguments: Any
) -> list[torch.Tensor]:
    """The same with new gradients, which it returns."""
    module.zero_grad()
    passes(module, i, rank, **arguments)
    return gradients(module)


def summed(module: Sharded) -> None:
    """Makes FSDP2 sum over replicas, then divide by a user-defined factor."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_gradient_divide_factor(2.0)
