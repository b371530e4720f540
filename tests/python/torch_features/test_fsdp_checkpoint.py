# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints of shards whose replicas are compressed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import torch_powersgd as tp
from support import ranks
from support.fsdp_pairs import (
    SHARDS,
    WORLD_SIZE,
    Sharded,
    both,
    make_pair,
    on_mesh,
    replicas,
    sharded,
    step,
    summed,
)
from support.meshes import mesh_of
from support.paired_training import OPTIONS, STEPS, TrainingPair
from support.states import from_bytes, own_part, to_bytes
from support.tensors import relative_error
from torch_powersgd.integrations import accelerate

# The mean state differs by the rounding of the saved residual M - P^ q, as in test_groups.
MEAN_TOLERANCE = 1e-4


def _difference(first: Sharded, second: Sharded, i: int, fed: int) -> float:
    """The largest relative difference of the gradients of a step."""
    pairs = zip(step(second, i, fed), step(first, i, fed), strict=True)
    return max(relative_error(mine, wanted) for mine, wanted in pairs)


@both
@pytest.mark.parametrize("per_rank", [True, False])
@on_mesh
def test_torchs_checkpoint_of_the_shards_goes_on(
    rank: int, per_rank: bool, native: bool, tmp_path: Path
) -> None:
    """Another module goes on from torch's checkpoint of the first, to the bit with ``per_rank``."""
    pairs = [make_pair(native=native) for _ in range(2)]
    first, second = (pair.modules[0] for pair in pairs)
    saved, loaded = (
        {"powersgd": pair.compression.per_rank if per_rank else pair.compression} for pair in pairs
    )
    # A rank's own residual is the mean where the replicas have the same inputs.
    fed = rank if per_rank else rank % SHARDS
    for i in range(STEPS):
        step(first, i, fed)
    dcp.save(saved, checkpoint_id=tmp_path)
    dcp.load(loaded, checkpoint_id=tmp_path)
    for i in range(3):
        assert _difference(first, second, i, fed) <= (0 if per_rank else MEAN_TOLERANCE)
    assert pairs[1].compression.stats()["steps"] == STEPS + 3


def _job(rank: int, native: bool, folder: str, ledgers: list[bytes] | None) -> bytes:
    """Trains, from torch's checkpoint in the folder if the ledgers of its shards are given.

    Returns:
        The ledger of this rank's shard.
    """
    pair = make_pair(native=native)
    state = {"model": pair.modules[0].state_dict(), "powersgd": pair.compression}
    if ledgers is not None:
        dcp.load(state, checkpoint_id=folder)
        pair.modules[0].load_state_dict(state["model"])
        pair.ledger.outputs, pair.ledger.means = from_bytes(ledgers[rank % SHARDS])
        pair.steps = pair.compression.stats()["steps"]
    for i in range(pair.steps, pair.steps + STEPS):
        pair.equalize()
        for module in pair.modules:
            step(module, i)
        pair.record()
        pair.descend()
    if ledgers is None:
        dcp.save(state, checkpoint_id=folder)
    pair.check()
    return to_bytes((pair.ledger.outputs, pair.ledger.means))


@both
def test_another_job_goes_on_with_as_many_replicas_or_more(native: bool, tmp_path: Path) -> None:
    ledgers = ranks.run(WORLD_SIZE, _job, native, str(tmp_path), None, backend="gloo")[:SHARDS]
    for world_size in (WORLD_SIZE, WORLD_SIZE + SHARDS):
        ranks.run(world_size, _job, native, str(tmp_path), ledgers, backend="gloo")


@on_mesh
def test_accelerates_one_file_has_all_shards(rank: int, tmp_path: Path) -> None:
    """Saves and loads as Accelerate does: the main process writes one file, which all read."""

    class Accelerator:
        scaler = None

        def register_save_state_pre_hook(self, hook: Callable[..., None]) -> None:
            self.save_state = hook

        def register_load_state_pre_hook(self, hook: Callable[..., None]) -> None:
            self.load_state = hook

        def save(self, state: Any, file: Path) -> None:
            if rank == 0:
                torch.save(state, file)

    mesh = mesh_of(("cpu:powersgd", OPTIONS))
    modules = [sharded(mesh) for _ in range(2)]
    accelerators: list[Any] = [Accelerator() for _ in modules]
    handles = [accelerate.attach(*pair) for pair in zip(accelerators, modules, strict=True)]
    for i in range(STEPS):
        step(modules[0], i, rank % SHARDS)
    accelerators[0].save_state([], [], tmp_path)
    dist.barrier()
    accelerators[1].load_state([], tmp_path)
    assert _difference(modules[0], modules[1], STEPS, rank % SHARDS) <= MEAN_TOLERANCE
    assert handles[1].stats()["steps"] == STEPS + 1


@on_mesh
def test_the_state_of_a_shard_has_a_key_of_its_own(rank: int) -> None:
    """Of shards, of tensor-parallel shards, and of whole replicas, which need none."""
    backend = ("cpu:powersgd", OPTIONS)
    mesh, tensor_mesh = mesh_of(backend), mesh_of(backend, ("shard", 1), ("tensor", 2))
    tensor = tensor_mesh["tensor"]
    shard, process = f"shard {rank % SHARDS} of {SHARDS}", f"process {rank // SHARDS} of 2"
    for module, group in (
        (sharded(mesh), None),
        (sharded(mesh["shard"]), mesh.get_group("replicate")),
        (sharded(tensor_mesh["replicate", "shard"], tensor), None),
        (sharded(tensor_mesh["shard"], tensor), tensor_mesh.get_group("replicate")),
    ):
        compression = tp.attach(module, OPTIONS, group=group)
        assert list(compression.state_dict()) == [shard]
        assert list(compression.state_dict(per_rank=True)) == [f"{shard}, {process}"]
    compression = tp.attach(replicas(backend), OPTIONS)
    assert "version" in compression.state_dict()
    assert list(compression.state_dict(per_rank=True)) == [f"process {rank} of {WORLD_SIZE}"]


@on_mesh
def test_the_state_of_another_shard_is_refused(rank: int) -> None:
    pair = make_pair(native=True)
    step(pair.modules[0], 0)
    mine, number = own_part(pair.compression.state_dict()), rank % SHARDS
    states: list[dict[str, Any]] = [
        {f"shard {1 - number} of {SHARDS}": mine},
        {f"shard {number} of {SHARDS + 1}": mine},
        mine,
    ]
    for state in states:
        with pytest.raises(ValueError, match=f"must have the part 'shard {number} of {SHARDS}'"):
            pair.compression.load_state_dict(state)


def _of_several_replicas(rank: int, saved: tuple[bytes, bytes] | None) -> tuple[bytes, bytes]:
    """Goes on from a state and a ledger, with gradients that FSDP2 sums and halves."""
    attached, plain = replicas(("cpu:powersgd", OPTIONS)), replicas("gloo")
    for module in (attached, plain):
        summed(module)
    pair = TrainingPair(attached, plain, tp.attach(attached))
    if saved is not None:
        pair.compression.load_state_dict(from_bytes(saved[0]))
        pair.ledger.outputs, pair.ledger.means = from_bytes(saved[1])
        pair.steps = STEPS
    for i in range(pair.steps, pair.steps + STEPS):
        for module in pair.modules:
            step(module, i)
        pair.record()
    pair.check()
    ledger = pair.ledger.outputs, pair.ledger.means
    return to_bytes(pair.compression.state_dict()), to_bytes(ledger)


def test_a_mean_checkpoint_moves_to_more_replicas_whose_gradients_are_summed() -> None:
    saved = ranks.run(2, _of_several_replicas, None, backend="gloo")[0]
    ranks.run(4, _of_several_replicas, saved, backend="gloo")
