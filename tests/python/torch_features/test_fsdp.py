# SPDX-License-Identifier: BSD-3-Clause
"""FSDP2's hybrid sharding: shards inside a replica, compression between the replicas.

Each training is done attached, and by FSDP2's own HSDP. ``native`` modules are attached on the
whole mesh, the others on their shards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy

import torch_powersgd as tp
from support.fsdp_pairs import (
    WORLD_SIZE,
    Net,
    Sharded,
    both,
    make_pair,
    on_mesh,
    passes,
    replicas,
    sharded,
    step,
    summed,
)
from support.ledger import TOLERANCE, Ledger
from support.meshes import mesh_of
from support.on_ranks import on_ranks
from support.paired_training import OPTIONS, STEPS, WARM_UP, TrainingPair
from support.synthetic import gradient
from support.tensors import same
from torch_powersgd.targets.fsdp_units import packed


@both
@on_mesh
def test_training_and_what_the_handle_says(rank: int, native: bool) -> None:
    pair = make_pair(native=native)
    pair.train(passes)
    pair.check()
    stats = pair.compression.stats()
    assert (stats["compressing"], stats["starts_at"], stats["steps"]) == (True, WARM_UP, STEPS)
    assert stats["compressed_calls"] == 3 * (STEPS - WARM_UP)  # one for each unit
    assert stats["residual_norms"].keys() == {name for name, _ in Net().named_parameters()}
    assert "3 of 7 parameters at matrix rank 2" in str(pair.compression)
    # Padded shards of 13, 13, 17 rows and their biases, and the gain.
    numel = 2 * (13 * 25 + 13) + 17 * 25 + 17 + 1
    factors = 2 * (2 * (13 + 25)) + 2 * (17 + 25) + 13 + 13 + 17 + 1
    counts = 2 * 3  # the use of each matrix, and the non-finite count of each unit
    assert stats["bytes_before"] == 4 * STEPS * numel
    assert stats["bytes_after"] == 4 * (WARM_UP * numel + (STEPS - WARM_UP) * (factors + counts))


@on_mesh
def test_a_mesh_with_replicas_is_attached_as_by_hand(rank: int) -> None:
    modules = [make_pair(native=native).modules[0] for native in (False, True)]
    for i in range(STEPS):
        assert same(*(step(module, i) for module in modules))
        norms: list[Any] = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in modules]
        assert same(*([norm.full_tensor()] for norm in norms))


def _compiled(backend: str) -> Callable[[nn.Module], nn.Module]:
    def compiled(block: nn.Module) -> nn.Module:
        block.compile(backend=backend)
        return block

    return compiled


@pytest.mark.parametrize(
    "name", ["checkpointed", "aot_eager", pytest.param("inductor", marks=pytest.mark.long)]
)
@on_ranks(WORLD_SIZE, backend="gloo")
def test_blocks_that_are_checkpointed_or_compiled(rank: int, name: str) -> None:
    prepare = checkpoint_wrapper if name == "checkpointed" else _compiled(name)
    pair = make_pair(native=True, prepare=prepare)
    pair.train(passes)
    pair.check()


@on_mesh
def test_replicas_without_shards(rank: int) -> None:
    attached, plain = replicas(("cpu:powersgd", OPTIONS)), replicas("gloo")
    pair = TrainingPair(attached, plain, tp.attach(attached))
    pair.train(passes)
    pair.check()


@on_mesh
def test_sums_in_place_of_averages(rank: int) -> None:
    pair = make_pair(native=True)
    for module in pair.modules:
        summed(module)
    pair.train(passes)
    pair.check()


def _only_the_last_one_communicates(module: Sharded, last: bool) -> None:
    module.set_requires_gradient_sync(last)


def _all_are_reduce_scattered(module: Sharded, last: bool) -> None:
    module.set_requires_all_reduce(last)


def _only_the_last_one_waits(module: Sharded, last: bool) -> None:
    module.set_requires_gradient_sync(last)
    module.set_is_last_backward(last)


# What is called before each micro-batch, with the module and whether it is the last one.
PREPARE = (_only_the_last_one_communicates, _all_are_reduce_scattered, _only_the_last_one_waits)


@both
@pytest.mark.parametrize("prepare", PREPARE, ids=lambda prepare: prepare.__name__.lstrip("_"))
@on_mesh
def test_accumulation(rank: int, prepare: Callable[[Sharded, bool], None], native: bool) -> None:
    def backward(module: Sharded, i: int) -> list[torch.Tensor]:
        seen = []
        for k in range(3):
            prepare(module, k == 2)
            seen += passes(module, 3 * i + k)
        return seen

    pair = make_pair(native=native)
    pair.train(backward)
    pair.check()


@both
@on_mesh
def test_prefetching_and_frozen_parameters(rank: int, native: bool) -> None:
    pair = make_pair(native=native)
    for module in pair.modules:
        first, second = module.blocks
        first.set_modules_to_forward_prefetch([second])
        second.set_modules_to_backward_prefetch([first])
        module.out.weight.requires_grad_(False)
    pair.train(passes)
    pair.check()


VARIANTS: dict[str, dict[str, Any]] = {
    "int8": {"options": replace(OPTIONS, wire_dtype="int8")},
    "mixed precision": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "no resharding": {"reshard_after_forward": False},
    "unit of modules": {"units": [["blocks.1", "out"]]},
}


def train_variant(rank: int, name: str, native: bool, device: str) -> None:
    pair = make_pair(native=native, device=device, **VARIANTS[name])
    pair.train(passes)
    pair.check()
    assert pair.compression.stats()["steps"] == STEPS


@both
@pytest.mark.parametrize("name", VARIANTS)
@on_mesh
def test_options_and_arguments_of_fully_shard(rank: int, name: str, native: bool) -> None:
    train_variant(rank, name, native, "cpu")


@on_mesh
def test_gradients_in_float16(rank: int) -> None:
    """FSDP2 divides float16 gradients before and after the reduction."""
    pair = make_pair(native=True, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
    pair.train(passes)
    pair.check(default=4.9e-4)  # An output is rounded to 11 bits: 2^-11 = 4.9e-4 at most.


@on_mesh
def test_beside_tensor_parallelism(rank: int) -> None:
    """Replicas of two ranks that share the tensors of two layers, and shards of one rank."""
    mesh, other = (
        mesh_of(backend, ("shard", 1), ("tensor", 2))
        for backend in (("cpu:powersgd", OPTIONS), "gloo")
    )
    attached = sharded(mesh["shard"], mesh["tensor"])
    plain = sharded(other["replicate", "shard"], other["tensor"])
    compression = tp.attach(attached, group=mesh.get_group("replicate"))
    pair = TrainingPair(attached, plain, compression)
    pair.train(lambda module, i: passes(module, i, mesh.get_local_rank("replicate")))
    pair.check()


def _left_for_later(pair: TrainingPair, *parts: str) -> None:
    """Counts the plain gradients of the weights with such names, of which nothing was applied."""
    left = {
        name: gradient
        for name, gradient in pair.gradients(1).items()
        if "weight" in name and any(part in name for part in parts)
    }
    pair.ledger.add({name: torch.zeros_like(g) for name, g in left.items()}, left)


@both
@on_mesh
def test_discarded_and_late_steps(rank: int, native: bool) -> None:
    """Before some steps there is one that is discarded, and one that is delivered later."""
    pair = make_pair(replace(OPTIONS, allow_discard=True), native)
    for i in range(STEPS):
        pair.equalize()
        if i > WARM_UP:
            step(pair.modules[0], f"discarded {i}", scale=1e4 if rank == 1 else 1.0)
            pair.compression.discard_step()
            for module in pair.modules:
                step(module, f"late {i}")
            pair.compression.step_skipped()
            _left_for_later(pair, "")
        for module in pair.modules:
            step(module, i)
        pair.record()
        pair.descend()
    pair.check()


@both
@on_mesh
def test_loss_scale(rank: int, native: bool) -> None:
    """A scale that grows, and a step that is skipped because an input was not finite on one rank.

    It reaches the first block's gradients. The compressed gradients of the others stay residual.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    pair = make_pair(native=native, scaler=scaler)
    still = torch.optim.SGD(pair.modules[0].parameters(), lr=0.0)  # descend applies the gradients
    for i in range(STEPS + 1):
        pair.equalize()
        x = gradient((6, 25), "input", rank, i)
        bad = i == WARM_UP + 2
        if bad and rank == 1:
            x[0, 0] = float("inf")
        for module, scale in zip(pair.modules, (scaler.scale, lambda loss: loss), strict=True):
            module.zero_grad()
            scale(module(x).square().mean()).backward()
        scaler.unscale_(still)
        if bad:
            _left_for_later(pair, "blocks.1", "out")
        else:
            pair.record()
            pair.descend()
        scaler.step(still)
        scaler.update()
    pair.check()
    # It doubled every two steps; the bad step in between halved it.
    assert scaler.get_scale() == 8.0 * 2 * 2 * 0.5 * 2


# All units have flat gradients of more elements than min_numel. As in test_identity, each step
# whose gradients are almost zero drains two of some 20 dimensions of each unit's matrix.
DRAIN_STEPS, QUIET = 24, 1e-20
FLAT = tp.Options.hook_defaults(start_powerSGD_iter=0, matrix_approximation_rank=2, min_numel=64)


@on_mesh
def test_native_hsdp_is_compressed_flat(rank: int) -> None:
    """FSDP2's own HSDP, with its all-reduces in backward compressed as flat tensors."""
    mesh = mesh_of(("cpu:powersgd", FLAT))
    modules = sharded(mesh), sharded(mesh_of("gloo"))
    ledger = Ledger()
    for i in range(STEPS + DRAIN_STEPS):
        found, wanted = (step(m, i, scale=1 if i < STEPS else QUIET) for m in modules)
        if i < STEPS:
            assert same(found, wanted) is (i < 2)  # a flat gradient is exact in its first passes
        # The identity holds for the whole of a unit's all-reduce, in which the gradients lie side
        # by side.
        ledger.add(*({"all": torch.cat([g.flatten() for g in x])} for x in (found, wanted)))
        if i == STEPS - 1:
            assert ledger.errors()["all"] > 0.01
    assert ledger.errors()["all"] < TOLERANCE[torch.float32]
    calls = tp.stats(mesh.get_group("replicate"))["compressed_calls"]
    assert calls == 3 * (STEPS + DRAIN_STEPS - 2)


def test_gradients_may_be_packed_in_another_order_than_the_shards() -> None:
    shards = ["first", "second", "third"]
    assert packed(SimpleNamespace(fsdp_params=shards)) == shards  # before torch 2.15
    reordered = SimpleNamespace(fsdp_params=shards, _reduce_scatter_param_indices=[0, 2, 1])
    assert packed(reordered) == ["first", "third", "second"]
