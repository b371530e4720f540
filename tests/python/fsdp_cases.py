# SPDX-License-Identifier: BSD-3-Clause
"""Modules that FSDP2 has sharded, each trained twice: attached, and by FSDP2's own HSDP."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from synthetic import Ledger, Tensors, gradient
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from twins import OPTIONS, STEPS, WARM_UP, digest, same

import torch_powersgd as tp

REPLICAS, SHARDS = 2, 2


class Net(nn.Module):
    """Its shards are uneven, and of ``gain`` only the first rank has any."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(25, 25) for _ in range(2))
        self.gain = nn.Parameter(torch.ones(1))
        self.out = nn.Linear(25, 33)

    def forward(self, x, skip=None, gained=True):
        for i, block in enumerate(self.blocks):
            x = x if i == skip else torch.tanh(block(x))
        return self.out(self.gain * x if gained else x)


def mesh_of(replicate: object) -> DeviceMesh:
    return init_device_mesh(
        "cpu",
        (REPLICAS, SHARDS),
        mesh_dim_names=("replicate", "shard"),
        backend_override={"replicate": replicate, "shard": "gloo"},
    )


def sharded(mesh: DeviceMesh, **arguments: object) -> nn.Module:
    torch.manual_seed(0)
    net = Net()
    for block in net.blocks:
        fully_shard(block, mesh=mesh, **arguments)
    return fully_shard(net, mesh=mesh, **arguments)


def locals_of(module: nn.Module) -> Tensors:
    """This rank's shards of the parameters."""
    return {name: p.detach().to_local() for name, p in module.named_parameters()}


def gradients(module: nn.Module) -> Tensors:
    """This rank's shards of the gradients."""
    return {
        name: p.grad.to_local().clone()
        for name, p in module.named_parameters()
        if p.grad is not None
    }


@dataclass
class Facts:
    warm_up: list[bool] = field(default_factory=list)  # gradients as native HSDP has them
    compressed: list[bool] = field(default_factory=list)  # gradients that differ, after warm-up
    errors: dict[str, float] = field(default_factory=dict)  # of the identity, by parameter
    replica: list[str] = field(default_factory=list)  # digest of gradients and shards, by step
    extra: object = None


class Twins:
    """The same training, attached, and by FSDP2's own HSDP over Gloo."""

    def __init__(self, **arguments: object) -> None:
        self.mesh = mesh_of(("cpu:powersgd", OPTIONS))
        self.attached = sharded(self.mesh["shard"], **arguments)
        self.plain = sharded(mesh_of("gloo"), **arguments)
        self.group = self.mesh.get_group("replicate")
        tp.attach(self.attached, group=self.group)
        self.facts, self.ledger = Facts(), Ledger()

    def train(self, rank: int, micro_batches: int = 1, prepare=None, skip=None) -> Facts:
        for i in range(STEPS):
            with torch.no_grad():
                for mine, other in zip(
                    locals_of(self.plain).values(), locals_of(self.attached).values(), strict=True
                ):
                    mine.copy_(other)
            for module in (self.attached, self.plain):
                module.zero_grad()
                for k in range(micro_batches):
                    if prepare is not None:
                        prepare(module, last=k == micro_batches - 1)
                    x = gradient((6, 25), "input", rank, micro_batches * i + k)
                    module(x, skip(i) if skip else None).square().mean().backward()
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
        """Mean over the replicas, without the padding."""
        shards = locals_of(self.attached)
        return {
            name: saved["residual"][: len(shards[name])].double()
            for name, saved in tp.state_dict(self.attached)["parameters"].items()
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


CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


@case
def plain(rank):
    twins = Twins()
    facts = twins.train(rank)
    stats = tp.stats(twins.group)
    facts.extra = stats["steps"], stats["compressed_calls"], sorted(stats["residual_norms"])
    return facts


@case
def accumulation(rank):
    """Micro-batches without any communication but the last's."""
    return Twins().train(rank, 3, lambda module, last: module.set_requires_gradient_sync(last))


@case
def accumulation_of_shards(rank):
    """Micro-batches that are reduce-scattered, and only the last all-reduced."""
    return Twins().train(rank, 3, lambda module, last: module.set_requires_all_reduce(last))


@case
def mixed_precision(rank):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return Twins(mp_policy=policy).train(rank)


@case
def reshard_after_forward(rank):
    return Twins(reshard_after_forward=False).train(rank)


@case
def unused_parameters(rank):
    """A unit that is not used now and then; then it is not reduced either."""
    return Twins().train(rank, skip=lambda i: 0 if i % 3 == 1 else None)


@case
def frozen(rank):
    twins = Twins()
    for module in (twins.attached, twins.plain):
        module.out.weight.requires_grad_(False)
    return twins.train(rank)
