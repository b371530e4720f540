# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints of shards whose replicas are compressed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

import torch_powersgd as tp
from support import ranks
from support.fsdp_pairs import (
    REPLICAS,
    SHARDS,
    backward,
    make_modules,
    replicas,
    summed,
)
from support.paired_training import OPTIONS, STEPS
from support.synthetic import from_bytes, relative_error, to_bytes

WORLD_SIZE = REPLICAS * SHARDS


def _resumed(rank: int, per_rank: bool, native: bool) -> tuple[float, int]:
    """Another module goes on from the state of the first. A rank refuses another rank's shard."""
    first, second = make_modules(native)[0], make_modules(native)[0]
    # A rank's own residual is the mean where the replicas have the same inputs.
    fed = rank if per_rank else rank % SHARDS
    for i in range(STEPS):
        backward(first, fed, i)
    saved = from_bytes(to_bytes(tp.state_dict(first, per_rank=per_rank)))
    tp.load_state_dict(second, saved)
    pairs = [(backward(first, fed, i), backward(second, fed, i)) for i in range(3)]
    other = {**saved, "shard": [1 - saved["shard"][0], SHARDS]}
    with pytest.raises(ValueError, match="shard of the checkpoint"):
        tp.load_state_dict(second, other)
    errors = [
        relative_error(mine, wanted)
        for wanted_all, mine_all in pairs
        for wanted, mine in zip(wanted_all, mine_all, strict=True)
        if wanted.numel()  # a shard may have none
    ]
    return max(errors), tp.state_dict(second)["step"]


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize(("per_rank", "tolerance"), [(True, 0), (False, 1e-4)])
def test_a_checkpoint_of_the_shards_goes_on(per_rank: bool, tolerance: float, native: bool) -> None:
    # Each rank's own state is restored bit for bit. The mean state differs by the rounding of the
    # saved residual M - P^ q, as in test_groups.
    for error, steps in ranks.run(WORLD_SIZE, _resumed, per_rank, native, backend="gloo"):
        assert error <= tolerance
        assert steps == STEPS + 3


def _saved_by_dcp(rank: int, folder: str) -> bool:
    """torch.distributed.checkpoint saves the state of each shard once, under its own key."""
    first, second = make_modules(native=True)[0], make_modules(native=True)[0]
    for i in range(STEPS):
        backward(first, rank % SHARDS, i)
    key = f"powersgd, shard {rank % SHARDS}"
    dcp.save({key: tp.CompressionState(first)}, checkpoint_id=folder)
    dcp.load({key: tp.CompressionState(second)}, checkpoint_id=folder)
    return to_bytes(tp.state_dict(first)) == to_bytes(tp.state_dict(second))


def test_torchs_own_checkpoints_hold_each_shard(tmp_path: Path) -> None:
    assert all(ranks.run(WORLD_SIZE, _saved_by_dcp, str(tmp_path), backend="gloo"))


def _of_several_replicas(
    rank: int, begin: int, before: bytes | None, saved: bytes | None
) -> tuple[bytes, bytes, float]:
    """Goes on from a state, with gradients that FSDP2 sums and halves.

    Returns:
        The sum of the exact gradients less the outputs, the state, and the error of the identity.
    """
    (attached, _), (plain, _) = replicas(("cpu:powersgd", OPTIONS)), replicas("gloo")
    for module in (attached, plain):
        summed(module)
    tp.attach(attached)
    if saved is not None:
        tp.load_state_dict(attached, from_bytes(saved))
    unsent = None if before is None else from_bytes(before)
    for i in range(begin, begin + STEPS):
        found = [backward(module, rank, i) for module in (attached, plain)]
        left = [g.double() - out.double() for out, g in zip(*found, strict=True)]
        unsent = left if unsent is None else [a + b for a, b in zip(unsent, left, strict=True)]
    assert unsent is not None
    state = tp.state_dict(attached)
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
