# SPDX-License-Identifier: BSD-3-Clause
"""The trainings of test_fsdp.py: each is done attached, and by FSDP2's own HSDP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from support.fsdp_pairs import (
    Sharded,
    TrainingPair,
    backward,
    backward_in_two_passes,
    gradients,
    make_pair,
    mesh_of,
    replicas,
    sharded,
    summed,
)
from support.paired_training import OPTIONS, STEPS, WARM_UP, Facts
from support.synthetic import gradient

CASES: dict[str, Callable[..., Facts]] = {}


def case(function: Callable[..., Facts]) -> Callable[..., Facts]:
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
    facts.extra = pair.compression.stats(), str(pair.compression)
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
def native_compiled_blocks(rank: int, backend: str = "aot_eager") -> Facts:
    def compiled(block: nn.Module) -> nn.Module:
        block.compile(backend=backend)
        return block

    return make_pair(native=True, prepare=compiled).train(rank)


@case
def replicated(rank: int) -> Facts:
    return TrainingPair(replicas(("cpu:powersgd", OPTIONS)), replicas("gloo")).train(rank)


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
    facts.extra = pair.compression.stats()["steps"]
    return facts


def output_backward_by_itself(rank: int, native: bool) -> Facts:
    """A loss of pieces, which goes backward through the output layer before the other layers."""
    pair = make_pair(native=native, units=[["blocks.1", "out"]])
    for i in range(STEPS):
        pair.equalize()
        for module in (pair.attached, pair.plain):
            module.zero_grad()
            backward_in_two_passes(module, gradient((6, 25), "input", rank, i))
        pair.record(i)
    pair.facts.extra = pair.compression.stats()["steps"]
    return pair.finish()


# torch 2.11's own FSDP2 fails there. It gathers the unit for the first of its two passes only.
if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
    case_of_both(output_backward_by_itself)


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
def discarded_and_late(rank: int, native: bool) -> Facts:
    """Before some steps there is one that is discarded, and one that is delivered later."""
    pair = make_pair(replace(OPTIONS, allow_discard=True), native)
    for i in range(STEPS):
        pair.equalize()
        if i > WARM_UP:
            backward(pair.attached, rank, f"discarded {i}", scale=1e4 if rank == 1 else 1.0)
            pair.compression.discard_step()
            for module in (pair.attached, pair.plain):
                backward(module, rank, f"late {i}")
            pair.compression.step_skipped()
            late = {n: g.double() for n, g in gradients(pair.plain).items() if "weight" in n}
            pair.ledger.add({name: torch.zeros_like(g) for name, g in late.items()}, late)
        for module in (pair.attached, pair.plain):
            backward(module, rank, i)
        pair.record(i)
    return pair.finish()


@case_of_both
def loss_scale(rank: int, native: bool) -> Facts:
    """A scale that grows, and a step that is skipped because an input was not finite on one rank.

    It reaches the first block's gradients. The compressed gradients of the others stay residual.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    pair = make_pair(native=native, scaler=scaler)
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
