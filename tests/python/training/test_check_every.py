# SPDX-License-Identifier: BSD-3-Clause
"""The check of everything that must be equal on all ranks finds, reports and mends differences."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist

import torch_powersgd as tp
from support import ranks
from support.backward import SETTLE_PASSES, reduce_in_backward
from support.ddp import make_attached, make_compressed, step
from support.ledger import Ledger
from support.log_records import LogRecords
from support.on_ranks import all_agree, on_ranks
from support.states import own_part, without_checksums
from support.synthetic import gradients, mean_gradients
from support.tensors import digest

SHAPES = {"first": (30, 40), "second": (35, 25), "bias": (30,)}
OPTIONS = tp.Options.hook_defaults(
    start_powerSGD_iter=0, matrix_approximation_rank=2, min_numel=500, check_every=3
)


def _corrupt(compression: tp.Compression, name: str, field: str, mine: bool) -> None:
    """Flips the lowest bit of one number of this rank's state, if it is mine. Collective."""
    state = without_checksums(compression.state_dict(per_rank=True))
    values = own_part(state)["parameters"][f"weights.{name}"][field]
    values.view(-1).view(torch.int32)[5] ^= mine
    compression.load_state_dict(state)


def damaged(rank: int, damage: int | None, named: str, device: str = "cpu") -> None:
    """Runs nine steps; those after the damage do not use "second", so that its Q stays as it is.

    A parameter in use mends itself: the ranks add P, whatever each of them made it with.

    Args:
        damage: the rank whose Q of "second" is changed between steps 3 and 4.
        named: the ranks that the warning names.
    """
    records, ledger, seen = LogRecords(), Ledger(), []
    ddp, compression = make_compressed(SHAPES, OPTIONS, find_unused_parameters=True, device=device)
    for i in range(9):
        mine, means = gradients(SHAPES, rank, i), mean_gradients(SHAPES, dist.get_world_size(), i)
        if i >= 4:
            del mine["second"], means["second"]
        ledger.add(step(ddp, mine), means)
        if i == 3:
            _corrupt(compression, "second", "q_warm", rank == damage)
        seen.append(compression.stats()["differences"])
    # It is found by the check after the sixth step.
    assert seen == ([0] * 9 if damage is None else [0] * 5 + [1] * 4)
    said = [match.string for level, match in records.matching("differed") if level == "WARNING"]
    assert len(said) == (damage is not None)
    if said:
        assert f"the Q of 'weights.second' differed from rank 0's on rank {named};" in said[0]
    state = own_part(compression.state_dict(per_rank=True))["parameters"]
    replicas = [entry[field].cpu() for entry in state.values() for field in ("q_warm", "p_hat")]
    assert all_agree(digest(replicas))
    ledger.check(compression)


@pytest.mark.parametrize(
    ("world_size", "damage", "named"), [(2, None, ""), (2, 1, "1"), (3, 2, "2"), (3, 0, "1, 2")]
)
@on_ranks(options=OPTIONS)
def test_a_difference_is_found_mended_and_counted(
    rank: int, world_size: int, damage: int | None, named: str
) -> None:
    damaged(rank, damage, named)


def _trained(rank: int, options: tp.Options) -> tuple[str, int]:
    """The digest of all outputs of an attached part and a flat one."""
    ddp = make_attached(SHAPES, options)
    outputs: list[torch.Tensor] = []
    for i in range(7):
        outputs += step(ddp, gradients(SHAPES, rank, i)).values()
        with tp.scope("always"):
            outputs += reduce_in_backward([gradients({"flat": (1000,)}, rank, i)["flat"]])
    return digest(outputs), tp.stats()["compressed_calls"]


def test_the_check_changes_nothing() -> None:
    always, never = (dataclasses.replace(OPTIONS, check_every=every) for every in (1, 0))
    expected = ranks.run(2, _trained, never, options=never)
    assert ranks.run(2, _trained, always, options=always) == expected
    assert expected[0][1] == 7 + 7 - SETTLE_PASSES
