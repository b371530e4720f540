# SPDX-License-Identifier: BSD-3-Clause
"""Each rank's own state, which resumes bit for bit, and torch.distributed.checkpoint."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support import ranks
from support.ddp import make_compressed, step
from support.log_records import LogRecords
from support.on_ranks import all_agree, on_ranks
from support.states import from_bytes, own_part, to_bytes, without_checksums
from support.synthetic import SHAPES, gradients
from support.tensors import same

OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=1, matrix_approximation_rank=2)
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "no feedback": ({"use_error_feedback": False}, {}),
    "half residual": ({"residual_dtype": torch.bfloat16}, {}),
    "cold": ({"warm_start": False}, {}),
    **{wire: ({"wire_dtype": wire}, {}) for wire in ("bfloat16", "int8", "int4")},
    # The state belongs to parameters: it does not matter which bucket holds them.
    "other buckets": ({}, {"bucket_cap_mb": 1e-4}),
}
SAVED, ENDED = 4, 8  # steps

State = dict[str, Any]


def _train(
    rank: int, ddp: DistributedDataParallel, compression: tp.Compression, steps: range
) -> list[torch.Tensor]:
    outputs: list[torch.Tensor] = []
    for i in steps:
        compression.grad_scale = 2 ** (i % 3)  # changes the units of the residual
        outputs += step(ddp, gradients(SHAPES, rank, i)).values()
    return outputs


@pytest.mark.parametrize(
    ("variant", "world_size"), [*((variant, 2) for variant in VARIANTS), ("plain", 3)]
)
@on_ranks()
def test_resumes_bit_for_bit(rank: int, variant: str, world_size: int) -> None:
    fields, resumed_arguments = VARIANTS[variant]
    options = dataclasses.replace(OPTIONS, **fields)
    # DDP rebuilds its buckets in another order after the first step. The sum of three ranks depends
    # on the place of its elements in a buffer, compressed or not. The sum of two ranks does not.
    arguments: dict[str, Any] = {"find_unused_parameters": world_size > 2}
    whole, of_whole = make_compressed(SHAPES, options, **arguments)
    _train(rank, whole, of_whole, range(SAVED))
    state = to_bytes(of_whole.state_dict(per_rank=True))
    assert not all_agree(state), "each rank's own"
    resumed, of_resumed = make_compressed(SHAPES, options, **arguments, **resumed_arguments)
    of_resumed.load_state_dict(from_bytes(state))
    expected = _train(rank, whole, of_whole, range(SAVED, ENDED))
    assert same(_train(rank, resumed, of_resumed, range(SAVED, ENDED)), expected)


def _states(rank: int) -> bytes:
    ddp, compression = make_compressed(SHAPES, OPTIONS)
    _train(rank, ddp, compression, range(SAVED))
    return to_bytes(without_checksums(compression.state_dict(per_rank=True)))


@pytest.fixture(scope="module")
def states() -> list[bytes]:
    """The states of two ranks, without the checksums, which would reveal every change."""
    return ranks.run(2, _states)


def _renamed(states: list[State]) -> None:
    for state in states:
        parameters = own_part(state)["parameters"]
        parameters["weights.other"] = parameters.pop("weights.conv")


def _one_older(states: list[State]) -> None:
    own_part(states[1])["step"] -= 1


def _anothers(states: list[State]) -> None:
    states[1:] = states[:1] * 2


@pytest.mark.parametrize(
    ("spoil", "message", "world_size", "factors"),
    [
        (_anothers, "rank 1: .*must have the part 'process 1 of 2'.*process 0 of 2", 2, 2),
        (_one_older, "step is 4 on rank 0 and 3 on rank 1", 2, 2),
        (_renamed, "'weights.other' is not in the model", 2, 2),
        (list, "saved with other options", 2, 3),  # nothing is spoilt
        (_anothers, "'process 0 of 3'.*Saved without per_rank, it can be loaded by any", 3, 2),
    ],
)
@on_ranks()
def test_a_state_that_is_not_this_ranks_is_refused_everywhere(
    rank: int, states: list[bytes], spoil: Any, message: str, world_size: int, factors: int
) -> None:
    spoil(loaded := [from_bytes(state) for state in states])
    options = dataclasses.replace(OPTIONS, matrix_approximation_rank=factors)
    ddp, compression = make_compressed(SHAPES, options)
    _train(rank, ddp, compression, range(2))
    before = to_bytes(compression.state_dict(per_rank=True))
    with pytest.raises(ValueError, match=message):
        compression.load_state_dict(loaded[rank])
    assert before == to_bytes(compression.state_dict(per_rank=True)), "nothing has changed"


@on_ranks(2)
def test_distributed_checkpoint_of_each_rank(rank: int, tmp_path: Path) -> None:
    """Every process gives torch its part under the same name."""
    first, of_first = make_compressed(SHAPES, OPTIONS)
    _train(rank, first, of_first, range(SAVED))
    dcp.save({"powersgd": of_first.per_rank}, checkpoint_id=tmp_path)
    second, of_second = make_compressed(SHAPES, OPTIONS)
    dcp.load({"powersgd": of_second.per_rank}, checkpoint_id=tmp_path)
    states = [to_bytes(handle.state_dict(per_rank=True)) for handle in (of_first, of_second)]
    assert states[0] == states[1]
    steps = range(SAVED, ENDED)
    assert same(_train(rank, first, of_first, steps), _train(rank, second, of_second, steps))


@on_ranks(2)
def test_a_distributed_checkpoint_without_compression(rank: int, tmp_path: Path) -> None:
    """Training starts anew, and a planner that loads parts finds what there is."""
    records = LogRecords(logging.INFO)
    ddp, compression = make_compressed(SHAPES, OPTIONS)
    dcp.save({"model": ddp.module.state_dict()}, checkpoint_id=tmp_path)
    before = to_bytes(compression.state_dict(per_rank=True))
    for handle in (compression, compression.per_rank):
        planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
        dcp.load(
            {"model": ddp.module.state_dict(), "powersgd": handle},
            checkpoint_id=tmp_path,
            planner=planner,
        )
        assert to_bytes(compression.state_dict(per_rank=True)) == before
    said = records.matching("loaded a state without any step, so compression starts as in a new")
    assert len(said) == 2 * (rank == 0)


def _mean(rank: int, folder: Path, save: bool) -> bytes:
    """The mean state that is saved, or loaded."""
    ddp, compression = make_compressed(SHAPES, OPTIONS)
    if save:
        _train(rank, ddp, compression, range(SAVED))
        dcp.save({"powersgd": compression}, checkpoint_id=folder)
    else:
        dcp.load({"powersgd": compression}, checkpoint_id=folder)
    return to_bytes(compression.state_dict())


def test_distributed_checkpoint_of_the_mean(tmp_path: Path) -> None:
    saved = from_bytes(ranks.run(2, _mean, tmp_path, True)[0])["parameters"]
    for world_size in (2, 3):
        for state in map(from_bytes, ranks.run(world_size, _mean, tmp_path, False)):
            assert state["step"] == SAVED
            for name, entry in state["parameters"].items():
                for field in ("residual", "q"):
                    torch.testing.assert_close(entry[field], saved[name][field])
