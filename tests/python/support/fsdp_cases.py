# SPDX-License-Identifier: BSD-3-Clause
"""Modules sharded by FSDP2 (fully_shard), each trained twice: attached, and by FSDP2's own HSDP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import torch_powersgd as tp
from support.paired_training import OPTIONS, STEPS, WARM_UP, Facts, digest, same
from support.synthetic import Ledger, Tensors, gradient

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
    """A mesh with a dimension of replicas.

    Args:
        replicate: the backend of the replicas, or a tuple of it and its options.
        others: name and size of each other dimension, over Gloo; default: one of shards.
    """
    names, sizes = zip(("replicate", REPLICAS), *(others or [("shard", SHARDS)]), strict=True)
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
        self, attached: Sharded, plain: Sharded, group: dist.ProcessGroup, native: bool = False
    ) -> None:
        self.attached, self.plain, self.group = attached, plain, group
        tp.attach(self.attached, group=None if native else self.group)
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
        shards, state = locals_of(self.attached), tp.state_dict(self.attached)
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
    options: tp.Options = OPTIONS, native: bool = False, **arguments: Any
) -> TrainingPair:
    """A module that is attached on its shards, or if it is native on the whole mesh."""
    mesh = mesh_of(("cpu:powersgd", options))
    attached = sharded(mesh if native else mesh["shard"], **arguments)
    plain = sharded(mesh_of("gloo"), **arguments)
    return TrainingPair(attached, plain, mesh.get_group("replicate"), native)


def summed(module: Sharded) -> None:
    """Makes FSDP2 sum between replicas, and then divide by a number of its user's."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_gradient_divide_factor(2.0)


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


CASES: dict[str, Callable[[int], Facts]] = {}


def case(function: Callable[[int], Facts]) -> Callable[[int], Facts]:
    CASES[function.__name__] = function
    return function


def case_of_both(function: Callable[..., Facts]) -> None:
    """Makes two cases of a function of the rank: attached on the shards, and native."""
    CASES[function.__name__] = partial(function, native=False)
    CASES[f"native_{function.__name__}"] = partial(function, native=True)


@case_of_both
def plain(rank: int, native: bool) -> Facts:
    pair = make_pair(native=native)
    facts = pair.train(rank)
    stats = tp.stats(pair.group)
    facts.extra = stats["steps"], stats["compressed_calls"], sorted(stats["residual_norms"])
    return facts


@case
def native_sum(rank: int) -> Facts:
    pair = make_pair(native=True)
    summed(pair.attached)
    summed(pair.plain)
    return pair.train(rank)


@case
def native_checkpointed_activations(rank: int) -> Facts:
    return make_pair(native=True, prepare=checkpoint_wrapper).train(rank)


@case
def native_compiled_blocks(rank: int) -> Facts:
    def compiled(block: nn.Module) -> nn.Module:
        block.compile(backend="aot_eager")
        return block

    return make_pair(native=True, prepare=compiled).train(rank)


def replicas(backend: Any) -> tuple[Sharded, dist.ProcessGroup]:
    """A module of which each rank is a replica, by ``replicate()``, and its group."""
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
    return replicate(net, mesh=mesh), mesh.get_group()


@case
def replicated(rank: int) -> Facts:
    attached, group = replicas(("cpu:powersgd", OPTIONS))
    return TrainingPair(attached, replicas("gloo")[0], group, native=True).train(rank)


@case_of_both
def int8_wire(rank: int, native: bool) -> Facts:
    return make_pair(replace(OPTIONS, wire_dtype="int8"), native).train(rank)


@case_of_both
def int4_wire(rank: int, native: bool) -> Facts:
    """Some steps do not use, and therefore do not reduce, a unit."""
    options = replace(OPTIONS, wire_dtype="int4")
    return make_pair(options, native).train(rank, skip=lambda i: 0 if i % 3 == 1 else None)


@case_of_both
def accumulation(rank: int, native: bool) -> Facts:
    """Micro-batches of which only the last one communicates."""
    return make_pair(native=native).train(
        rank, 3, lambda module, last: module.set_requires_gradient_sync(last)
    )


@case_of_both
def accumulation_of_shards(rank: int, native: bool) -> Facts:
    """Micro-batches that are all reduce-scattered, of which only the last one is all-reduced."""
    return make_pair(native=native).train(
        rank, 3, lambda module, last: module.set_requires_all_reduce(last)
    )


@case_of_both
def last_backward(rank: int, native: bool) -> Facts:
    """Micro-batches of which only the last one waits for what the passes have begun."""

    def prepare(module: Sharded, last: bool) -> None:
        module.set_requires_gradient_sync(last)
        module.set_is_last_backward(last)

    return make_pair(native=native).train(rank, 2, prepare)


@case_of_both
def prefetching(rank: int, native: bool) -> Facts:
    pair = make_pair(native=native)
    for module in (pair.attached, pair.plain):
        first, second = module.blocks
        first.set_modules_to_forward_prefetch([second])
        second.set_modules_to_backward_prefetch([first])
    return pair.train(rank)


@case_of_both
def unit_of_modules(rank: int, native: bool) -> Facts:
    """A unit of a block and the output layer."""
    pair = make_pair(native=native, units=[["blocks.1", "out"]])
    facts = pair.train(rank)
    facts.extra = tp.stats(pair.group)["steps"]
    return facts


@case_of_both
def output_backward_by_itself(rank: int, native: bool) -> Facts:
    """A loss of pieces, which goes backward through the output layer before the other layers."""
    pair = make_pair(native=native, units=[["blocks.1", "out"]])
    for i in range(STEPS):
        pair.equalize()
        for module in (pair.attached, pair.plain):
            module.zero_grad()
            backward_in_two_passes(module, gradient((6, 25), "input", rank, i))
        pair.record(i)
    pair.facts.extra = tp.stats(pair.group)["steps"]
    return pair.finish()


@case
def tensor_parallel(rank: int) -> Facts:
    """Replicas of two ranks that share the tensors of two layers, and shards of one rank."""
    mesh, other = (
        mesh_of(backend, ("shard", 1), ("tensor", 2))
        for backend in (("cpu:powersgd", OPTIONS), "gloo")
    )
    pair = TrainingPair(
        sharded(mesh["shard"], mesh["tensor"]),
        sharded(other["replicate", "shard"], other["tensor"]),
        mesh.get_group("replicate"),
    )
    return pair.train(mesh.get_local_rank("replicate"))


@case_of_both
def mixed_precision(rank: int, native: bool) -> Facts:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return make_pair(native=native, mp_policy=policy).train(rank)


@case_of_both
def reshard_after_forward(rank: int, native: bool) -> Facts:
    return make_pair(native=native, reshard_after_forward=False).train(rank)


@case_of_both
def unused_parameters(rank: int, native: bool) -> Facts:
    """A unit that some steps do not use, and therefore do not reduce."""
    return make_pair(native=native).train(rank, skip=lambda i: 0 if i % 3 == 1 else None)


@case_of_both
def frozen(rank: int, native: bool) -> Facts:
    pair = make_pair(native=native)
    for module in (pair.attached, pair.plain):
        module.out.weight.requires_grad_(False)
    return pair.train(rank)


@case_of_both
def loss_scale(rank: int, native: bool) -> Facts:
    """A scale that grows, and a step that is skipped because an input was not finite on one rank.

    It reaches the first block's gradients. The compressed gradients of the others stay residual.
    """
    pair = make_pair(native=native)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    tp.attach(pair.attached, scaler=scaler)
    still = torch.optim.SGD(pair.attached.parameters(), lr=0.0)  # record() applies the gradients
    for i in range(STEPS + 1):
        pair.equalize()
        x = gradient((6, 25), "input", rank, i)
        bad = i == WARM_UP + 2
        if bad and rank == 1:
            x[0, 0] = float("inf")
        for module, scale in ((pair.attached, scaler.scale), (pair.plain, lambda loss: loss)):
            module.zero_grad()
            scale(module(x).square().mean()).backward()
        scaler.unscale_(still)
        if bad:
            wanted = gradients(pair.plain)
            kept = {name: wanted[name].double() for name in ("blocks.1.weight", "out.weight")}
            pair.ledger.add({name: torch.zeros_like(g) for name, g in kept.items()}, kept)
        else:
            pair.record(i)
        scaler.step(still)
        scaler.update()
    pair.facts.extra = scaler.get_scale()
    return pair.finish()
