# SPDX-License-Identifier: BSD-3-Clause
"""Modules sharded by FSDP2 (fully_shard), attached, and the same averaged by FSDP2's own HSDP."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import torch_powersgd as tp
from support.paired_training import OPTIONS, STEPS, WARM_UP, Facts, digest, same
from support.synthetic import Ledger, Tensors, gradient, own_part

REPLICAS, SHARDS = 2, 2

# A Net that is an FSDPModule as well: fully_shard changes the class of its argument.
Sharded = Any

# The names of the modules of each unit of a Net but the last, which is the rest. None: the blocks.
Units = Sequence[Sequence[str]] | None


class Net(nn.Module):
    """A net with uneven shards. Only the first rank has an element of ``gain``."""

    def __init__(self, width: int = 25) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.gain = nn.Parameter(torch.ones(1))
        self.out = nn.Linear(width, 33)

    def forward(
        self,
        x: torch.Tensor,
        skip: int | None = None,
        gained: bool = True,
        headless: bool = False,
    ) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            x = x if i == skip else torch.tanh(block(x))
        x = self.gain * x if gained else x
        output: torch.Tensor = x if headless else self.out(x)
        return output


def mesh_of(replicate: Any, *others: tuple[str, int]) -> DeviceMesh:
    """A mesh of all ranks with a dimension of replicas.

    Args:
        replicate: the backend of the replicas, or a tuple of it and its options.
        others: name and size of each other dimension, over Gloo; default: one of shards.
    """
    others = others or (("shard", SHARDS),)
    replicas = dist.get_world_size() // math.prod(size for _, size in others)
    names, sizes = zip(("replicate", replicas), *others, strict=True)
    backends = {**dict.fromkeys(names, "gloo"), "replicate": replicate}
    return init_device_mesh("cpu", sizes, mesh_dim_names=names, backend_override=backends)


def sharded(
    mesh: DeviceMesh,
    tensor_mesh: DeviceMesh | None = None,
    prepare: Callable[[nn.Module], nn.Module] = lambda block: block,
    units: Units = None,
    **arguments: Any,
) -> Sharded:
    """A net of which each unit of blocks, as ``prepare`` returns them, and the rest are sharded."""
    torch.manual_seed(0)
    net = Net()
    if tensor_mesh is not None:
        net = Net(24)  # FSDP2 wants a width that two ranks share evenly
        parallelize_module(
            net, tensor_mesh, {"blocks.0": ColwiseParallel(), "blocks.1": RowwiseParallel()}
        )
    net.blocks = nn.ModuleList(prepare(block) for block in net.blocks)
    for unit in (["blocks.0"], ["blocks.1"]) if units is None else units:
        fully_shard([net.get_submodule(name) for name in unit], mesh=mesh, **arguments)
    return fully_shard(net, mesh=mesh, **arguments)


def locals_of(module: Sharded) -> Tensors:
    """This rank's shards of the parameters."""
    return {name: p.detach().to_local() for name, p in module.named_parameters()}


def gradients(module: Sharded) -> Tensors:
    """This rank's shards of the gradients."""
    return {
        name: p.grad.to_local().clone()
        for name, p in module.named_parameters()
        if p.grad is not None
    }


class TrainingPair:
    """The same training, attached, and by FSDP2's own HSDP over Gloo."""

    def __init__(
        self,
        attached: Sharded,
        plain: Sharded,
        group: dist.ProcessGroup | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.attached, self.plain = attached, plain
        self.compression = tp.attach(attached, scaler=scaler, group=group)
        self.facts, self.ledger = Facts(), Ledger()

    def equalize(self) -> None:
        """The plain module takes over the parameters of the attached one."""
        pairs = zip(locals_of(self.plain).values(), locals_of(self.attached).values(), strict=True)
        for mine, other in pairs:
            mine.copy_(other)

    def train(
        self,
        rank: int,
        micro_batches: int = 1,
        prepare: Callable[[Sharded, bool], None] | None = None,
        skip: Callable[[int], int | None] | None = None,
    ) -> Facts:
        """Trains both.

        Args:
            prepare: called before each micro-batch with the module and whether it is the last one.
            skip: the block that a step leaves out, if any.
        """
        for i in range(STEPS):
            self.equalize()
            seen = []
            for module in (self.attached, self.plain):
                module.zero_grad()
                for k in range(micro_batches):
                    if prepare is not None:
                        prepare(module, k == micro_batches - 1)
                    width = module.out.weight.shape[1]
                    x = gradient((6, width), "input", rank, micro_batches * i + k)
                    loss = module(x.requires_grad_(), skip(i) if skip else None).square().mean()
                    loss.backward()
                seen.append([loss, x.grad])
            self.facts.exact.append(same(*seen))
            self.record(i)
        return self.finish()

    def record(self, i: int) -> None:
        found, wanted = gradients(self.attached), gradients(self.plain)
        assert found.keys() == wanted.keys()
        self.ledger.add(found, {name: g.double() for name, g in wanted.items()})
        equal = same(found.values(), wanted.values())
        (self.facts.warm_up if i < WARM_UP else self.facts.compressed).append(equal)
        with torch.no_grad():
            for name, p in self.attached.named_parameters():
                if name in found:
                    p.to_local().sub_(found[name], alpha=0.05)
        self.facts.replica.append(digest([*found.values(), *locals_of(self.attached).values()]))

    def residuals(self) -> Tensors:
        """The mean residuals of the replicas, without the padding and the loss scale."""
        shards, state = locals_of(self.attached), own_part(self.compression.state_dict())
        return {
            name: saved["residual"][: len(shards[name])].double() / state["grad_scale"]
            for name, saved in state["parameters"].items()
        }

    def finish(self) -> Facts:
        residuals = self.residuals()
        assert residuals, "nothing was compressed"
        self.facts.errors = {
            name: error
            for name, error in self.ledger.errors(residuals).items()
            if len(locals_of(self.attached)[name])  # 0 / 0 of a shard without elements
        }
        return self.facts


def make_pair(
    options: tp.Options = OPTIONS,
    native: bool = False,
    scaler: torch.amp.GradScaler | None = None,
    **arguments: Any,
) -> TrainingPair:
    """A module that is attached on its shards, or if it is native on the whole mesh."""
    mesh = mesh_of(("cpu:powersgd", options))
    attached = sharded(mesh if native else mesh["shard"], **arguments)
    plain = sharded(mesh_of("gloo"), **arguments)
    group = None if native else mesh.get_group("replicate")
    return TrainingPair(attached, plain, group, scaler)


def summed(module: Sharded) -> None:
    """Makes FSDP2 sum between replicas, and then divide by a number of its user's."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_gradient_divide_factor(2.0)


def replicas(backend: Any) -> Sharded:
    """A module of which each rank is a replica, by ``replicate()``."""
    mesh = init_device_mesh(
        "cpu",
        (dist.get_world_size(),),
        mesh_dim_names=("replicate",),
        backend_override={"replicate": backend},
    )
    torch.manual_seed(0)
    net = Net()
    for block in net.blocks:
        replicate(block, mesh=mesh)
    return replicate(net, mesh=mesh)


def backward_in_two_passes(module: Sharded, x: torch.Tensor) -> None:
    """Goes backward through the output layer, one piece after the other, and then through the rest.

    As in torchtitan's chunked loss, the layer's gradients are reduced with those of the last piece.
    """
    hidden = module(x, headless=True)
    leaf = hidden.detach().requires_grad_()
    module.out.set_requires_gradient_sync(False, recurse=False)
    module.out.unshard()
    pieces = leaf.chunk(2)
    for piece in pieces:
        module.out.set_requires_gradient_sync(piece is pieces[-1], recurse=False)
        module.out(piece).square().mean().backward()
    module.out.reshard()
    hidden.backward(leaf.grad)


def backward(
    module: Sharded, rank: int, i: object, scale: float = 1, **arguments: Any
) -> list[torch.Tensor]:
    module.zero_grad()
    loss = module(gradient((6, 25), "input", rank, i), **arguments).square().mean()
    (scale * loss).backward()
    return list(gradients(module).values())


def make_modules(
    native: bool = False, units: Units = None
) -> tuple[Sharded, Sharded, tp.Compression]:
    """An attached module, FSDP2's own HSDP with the same parameters, and the handle of the first.

    FSDP2 all-reduces the attached one by itself too if it is native.
    """
    mesh = mesh_of(("cpu:powersgd", OPTIONS))
    attached = sharded(mesh if native else mesh["shard"], units=units)
    compression = tp.attach(attached, group=mesh.get_group("replicate"))
    return attached, sharded(mesh_of("gloo"), units=units), compression
