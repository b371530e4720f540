# SPDX-License-Identifier: BSD-3-Clause
"""The check of everything that must be equal on all ranks finds, reports and mends differences."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import torch_powersgd as tp
from support import ranks
from support.call_observer import SETTLE_PASSES
from support.log_records import LogRecords
from support.synthetic import (
    Ledger,
    gradients,
    make_attached,
    make_compressed,
    mean_gradients,
    own_part,
    reduce_in_backward,
    step,
    without_checksums,
)

SHAPES = {"first": (30, 40), "second": (35, 25), "bias": (30,)}
OPTIONS = tp.Options.hook_defaults(
    start_powerSGD_iter=0, matrix_approximation_rank=2, min_numel=500, check_every=3
)


def _differences(records: LogRecords) -> list[str]:
    return [line for level, line in records.seen if level == "WARNING" and "differed" in line]


def _corrupt(compression: tp.Compression, name: str, field: str, mine: bool) -> None:
    """Flips the lowest bit of one number of this rank's state, if it is mine. Collective."""
    state = without_checksums(compression.state_dict(per_rank=True))
    values = own_part(state)["parameters"][f"weights.{name}"][field]
    values.view(-1).view(torch.int32)[5] ^= mine
    compression.load_state_dict(state)


def unused(
    rank: int, world_size: int, damage: int | None, device: str = "cpu"
) -> tuple[list[str], list[int], dict[tuple[str, str], bytes], dict[str, float]]:
    """Runs nine steps; those after the damage do not use "second", so that its Q stays as it is.

    A parameter in use mends itself: the ranks add P, whatever each of them made it with.

    Args:
        damage: the rank whose Q of "second" is changed between steps 3 and 4.

    Returns:
        the warnings; the count after each step; Q and P, in bytes; the identity's errors.
    """
    records, ledger, seen = LogRecords(), Ledger(), []
    ddp, compression = make_compressed(SHAPES, OPTIONS, find_unused_parameters=True, device=device)
    for i in range(9):
        mine, means = gradients(SHAPES, rank, i), mean_gradients(SHAPES, world_size, i)
        if i >= 4:
            del mine["second"], means["second"]
        outputs = step(ddp, {name: tensor.to(device) for name, tensor in mine.items()})
        ledger.add({name: tensor.cpu() for name, tensor in outputs.items()}, means)
        if i == 3:
            _corrupt(compression, "second", "q_warm", rank == damage)
        seen.append(compression.stats()["differences"])
    saved = compression.state_dict()["parameters"]
    residuals = {n.removeprefix("weights."): s["residual"].cpu().double() for n, s in saved.items()}
    state = own_part(compression.state_dict(per_rank=True))["parameters"]
    replicas = {
        (name, field): tensors[field].cpu().numpy().tobytes()
        for name, tensors in state.items()
        for field in ("q_warm", "p_hat")
    }
    return _differences(records), seen, replicas, ledger.errors(residuals)


@pytest.mark.parametrize(
    ("world_size", "damage", "named"), [(2, 1, "1"), (3, 2, "2"), (3, 0, "1, 2")]
)
def test_a_difference_is_found_mended_and_counted(world_size: int, damage: int, named: str) -> None:
    results = ranks.run(world_size, unused, world_size, damage, options=OPTIONS)
    for lines, seen, replicas, errors in results:
        assert seen == [0] * 5 + [1] * 4, "found by the check after the sixth step"
        (line,) = lines
        assert f"the Q of 'weights.second' differed from rank 0's on rank {named};" in line
        assert replicas == results[0][2]
        assert max(errors.values()) < 1e-5, errors


def test_nothing_to_find() -> None:
    for lines, seen, _, errors in ranks.run(2, unused, 2, None, options=OPTIONS):
        assert (lines, seen) == ([], [0] * 9)
        assert max(errors.values()) < 1e-5, errors


def _same_training(rank: int, options: tp.Options) -> tuple[list[bytes], int]:
    """All outputs of a training with an attached part and a flat one."""
    ddp = make_attached(SHAPES, options)
    outputs: list[torch.Tensor] = []
    for i in range(7):
        outputs += step(ddp, gradients(SHAPES, rank, i)).values()
        with tp.scope("always"):
            outputs += reduce_in_backward([gradients({"flat": (1000,)}, rank, i)["flat"]])
    return [output.numpy().tobytes() for output in outputs], tp.stats()["compressed_calls"]


def test_the_check_changes_nothing() -> None:
    never = dataclasses.replace(OPTIONS, check_every=0)
    always = dataclasses.replace(OPTIONS, check_every=1)
    expected = ranks.run(2, _same_training, never, options=never)
    assert ranks.run(2, _same_training, always, options=always) == expected
    assert expected[0][1] == 7 + 7 - SETTLE_PASSES
