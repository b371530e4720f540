# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints of shards whose replicas are compressed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import torch_powersgd as tp
from support import ranks
from support.fsdp_pairs import (
    REPLICAS,
    SHARDS,
    backward,
    make_modules,
    make_pair,
    mesh_of,
    replicas,
    sharded,
    summed,
)
from support.paired_training import OPTIONS, STEPS, Facts
from support.synthetic import from_bytes, own_part, relative_error, to_bytes
from torch_powersgd.integrations import accelerate

WORLD_SIZE = REPLICAS * SHARDS
TOLERANCE = 1e-5  # the identity in float32, as in test_identity


def _resumed(rank: int, per_rank: bool, native: bool, folder: str) -> tuple[float, int]:
    """Another module goes on from torch's checkpoint of the first.

    Returns:
        The largest relative difference of their gradients, and the steps of the second.
    """
    first, _, of_first = make_modules(native)
    second, _, of_second = make_modules(native)
    # A rank's own residual is the mean where the replicas have the same inputs.
    fed = rank if per_rank else rank % SHARDS
    for i in range(STEPS):
        backward(first, fed, i)
    dcp.save({"powersgd": of_first.per_rank if per_rank else of_first}, checkpoint_id=folder)
    dcp.load({"powersgd": of_second.per_rank if per_rank else of_second}, checkpoint_id=folder)
    pairs = [(backward(first, fed, i), backward(second, fed, i)) for i in range(3)]
    errors = [
        relative_error(mine, wanted)
        for wanted_all, mine_all in pairs
        for wanted, mine in zip(wanted_all, mine_all, strict=True)
        if wanted.numel()  # a shard may have none
    ]
    return max(errors), of_second.stats()["steps"]


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize(("per_rank", "tolerance"), [(True, 0), (False, 1e-4)])
def test_torchs_checkpoint_of_the_shards_goes_on(
    per_rank: bool, tolerance: float, native: bool, tmp_path: Path
) -> None:
    # Each rank's own state is restored bit for bit. The mean state differs by the rounding of the
    # saved residual M - P^ q, as in test_groups.
    arguments = (per_rank, native, str(tmp_path))
    for error, steps in ranks.run(WORLD_SIZE, _resumed, *arguments, backend="gloo"):
        assert error <= tolerance
        assert steps == STEPS + 3


def _job(rank: int, native: bool, folder: str, ledgers: list[bytes] | None) -> tuple[Facts, bytes]:
    """Trains, from torch's checkpoint in the folder if the ledgers of its shards are given.

    Returns:
        The facts, whose errors cover all steps so far, and the ledger of this rank's shard.
    """
    pair = make_pair(native=native)
    begin = 0
    if ledgers is not None:
        state = {"model": pair.attached.state_dict(), "powersgd": pair.compression}
        dcp.load(state, checkpoint_id=folder)
        pair.attached.load_state_dict(state["model"])
        pair.ledger.outputs, pair.ledger.means = from_bytes(ledgers[rank % SHARDS])
        begin = pair.compression.stats()["steps"]
    for i in range(begin, begin + STEPS):
        pair.equalize()
        for module in (pair.attached, pair.plain):
            backward(module, rank, i)
        pair.record(i)
    if ledgers is None:
        state = {"model": pair.attached.state_dict(), "powersgd": pair.compression}
        dcp.save(state, checkpoint_id=folder)
    return pair.finish(), to_bytes((pair.ledger.outputs, pair.ledger.means))


@pytest.mark.parametrize("native", [False, True])
def test_another_job_goes_on_with_as_many_replicas_or_more(native: bool, tmp_path: Path) -> None:
    saved = ranks.run(WORLD_SIZE, _job, native, str(tmp_path), None, backend="gloo")
    ledgers = [ledger for _, ledger in saved[:SHARDS]]
    for world_size in (WORLD_SIZE, WORLD_SIZE + SHARDS):
        arguments = (native, str(tmp_path), ledgers)
        for facts, _ in ranks.run(world_size, _job, *arguments, backend="gloo"):
            assert facts.compressed == [False] * STEPS  # the steps are counted on
            assert max(facts.errors.values()) < TOLERANCE, facts.errors


def _saved_by_the_main_process(rank: int, file: str) -> tuple[float, int]:
    """Saves and loads as Accelerate does: the main process writes one file, which all read."""
    mesh = mesh_of(("cpu:powersgd", OPTIONS))
    modules, handles, states = [sharded(mesh) for _ in range(2)], [], []
    for module in modules:
        registered: list[Any] = []
        accelerator: Any = SimpleNamespace(
            scaler=None, _custom_objects=[], register_for_checkpointing=registered.append
        )
        handles.append(accelerate.attach(accelerator, module))
        states += registered
    for i in range(STEPS):
        backward(modules[0], rank % SHARDS, i)
    saved = states[0].state_dict()
    if rank == 0:
        torch.save(saved, file)
    dist.barrier()
    states[1].load_state_dict(torch.load(file))
    first, second = (backward(module, rank % SHARDS, STEPS) for module in modules)
    pairs = [pair for pair in zip(second, first, strict=True) if pair[0].numel()]
    return max(relative_error(*pair) for pair in pairs), handles[1].stats()["steps"]


def test_accelerates_one_file_has_all_shards(tmp_path: Path) -> None:
    arguments = (_saved_by_the_main_process, str(tmp_path / "state"))
    for error, steps in ranks.run(WORLD_SIZE, *arguments, backend="gloo"):
        assert error <= 1e-4  # as above
        assert steps == STEPS + 1


def _keys(rank: int) -> list[list[str]]:
    """The keys of the states of shards, of tensor-parallel shards, and of whole replicas."""
    backend = ("cpu:powersgd", OPTIONS)
    mesh, tensor_mesh = mesh_of(backend), mesh_of(backend, ("shard", 1), ("tensor", 2))
    found: list[list[str]] = []
    for module, group in (
        (sharded(mesh), None),
        (sharded(mesh["shard"]), mesh.get_group("replicate")),
        (sharded(tensor_mesh["replicate", "shard"], tensor_mesh["tensor"]), None),
        (
            sharded(tensor_mesh["shard"], tensor_mesh["tensor"]),
            tensor_mesh.get_group("replicate"),
        ),
        (replicas(backend), None),
    ):
        compression = tp.attach(module, OPTIONS, group=group)
        for per_rank in (False, True):
            state = compression.state_dict(per_rank)
            found.append([] if "version" in state else list(state))
    return found


def test_the_state_of_a_shard_has_a_key_of_its_own() -> None:
    for rank, found in enumerate(ranks.run(WORLD_SIZE, _keys, backend="gloo")):
        shard, process = f"shard {rank % SHARDS} of {SHARDS}", f"process {rank // SHARDS} of 2"
        of_shard = [[shard], [f"{shard}, {process}"]]
        assert found == 4 * of_shard + [[], [f"process {rank} of {WORLD_SIZE}"]]


def _refused(rank: int) -> list[str]:
    module, _, compression = make_modules(native=True)
    backward(module, rank, 0)
    mine, number = own_part(compression.state_dict()), rank % SHARDS
    states: list[dict[str, Any]] = [
        {f"shard {1 - number} of {SHARDS}": mine},
        {f"shard {number} of {SHARDS + 1}": mine},
        mine,
    ]
    messages = []
    for state in states:
        with pytest.raises(ValueError, match="checkpoint") as caught:
            compression.load_state_dict(state)
        messages.append(str(caught.value))
    return messages


def test_the_state_of_another_shard_is_refused() -> None:
    for rank, messages in enumerate(ranks.run(WORLD_SIZE, _refused, backend="gloo")):
        for message in messages:
            assert f"must have the part 'shard {rank % SHARDS} of {SHARDS}'" in message


def _of_several_replicas(
    rank: int, begin: int, before: bytes | None, saved: bytes | None
) -> tuple[bytes, bytes, float]:
    """Goes on from a state, with gradients that FSDP2 sums and halves.

    Returns:
        The sum of the exact gradients less the outputs, the state, and the error of the identity.
    """
    attached, plain = replicas(("cpu:powersgd", OPTIONS)), replicas("gloo")
    for module in (attached, plain):
        summed(module)
    compression = tp.attach(attached)
    if saved is not None:
        compression.load_state_dict(from_bytes(saved))
    unsent = None if before is None else from_bytes(before)
    for i in range(begin, begin + STEPS):
        found = [backward(module, rank, i) for module in (attached, plain)]
        left = [g.double() - out.double() for out, g in zip(*found, strict=True)]
        unsent = left if unsent is None else [a + b for a, b in zip(unsent, left, strict=True)]
    assert unsent is not None
    state = compression.state_dict()
    errors = [
        relative_error(state["parameters"][name]["residual"].double(), residual)
        for (name, _), residual in zip(attached.named_parameters(), unsent, strict=True)
        if name in state["parameters"]
    ]
    return to_bytes(unsent), to_bytes(state), max(errors)


def test_a_mean_checkpoint_moves_to_more_replicas_whose_gradients_are_summed() -> None:
    unsent, state, error = ranks.run(2, _of_several_replicas, 0, None, None, backend="gloo")[0]
    # The expected residual is a sum of differences of float32 numbers, each with its rounding.
    assert error < 1e-4
    for _, _, error in ranks.run(4, _of_several_replicas, STEPS, unsent, state, backend="gloo"):
        assert error < 1e-4
