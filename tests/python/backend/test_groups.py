# SPDX-License-Identifier: BSD-3-Clause
"""Models that train in several process groups at once, and in one that is made again."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import torch_powersgd as tp
from support.ddp import make_compressed, outputs_of, step
from support.deadline import OPERATION
from support.groups import world
from support.ledger import Ledger
from support.on_ranks import on_ranks
from support.synthetic import SHAPES, gradients, mean_gradients

CPU = torch.device("cpu")


def _options(rank: int, **fields: Any) -> tp.Options:
    return tp.Options.hook_defaults(start_powerSGD_iter=0, matrix_approximation_rank=rank, **fields)


@on_ranks(4, options=_options(3))
def test_several_groups_with_options_of_their_own(rank: int) -> None:
    """One model in the default group, one in a group of two ranks, one in another group of all."""
    pairs = [
        dist.new_group(pair, backend="cpu:powersgd", pg_options=_options(1, warm_start=False))
        for pair in ([0, 1], [2, 3])
    ]
    exact = dist.new_group(backend="cpu:powersgd", pg_options=_options(1, scope="never"))
    groups = [dist.group.WORLD, pairs[rank // 2], exact]
    models = [make_compressed(SHAPES, process_group=group) for group in groups]
    ledgers = [Ledger() for _ in models]
    for i in range(6):
        mine = gradients(SHAPES, rank, i)
        for ddp, _ in models:
            ddp.zero_grad()
        # One backward pass serves all models: their collectives are in flight together.
        sum(ddp(mine) for ddp, _ in models).backward()
        for (ddp, _), ledger, group in zip(models, ledgers, groups, strict=True):
            ledger.add(
                outputs_of(ddp), mean_gradients(SHAPES, dist.get_process_group_ranks(group), i)
            )
    for (_, compression), ledger, calls, q_rank in zip(
        models, ledgers, (6, 6, 0), (3, 1, 1), strict=True
    ):
        ledger.check(compression)
        assert compression.stats()["compressed_calls"] == calls
        parameters = compression.state_dict()["parameters"].values()
        assert {saved["q"].shape[0] for saved in parameters} == {q_rank}


@on_ranks(4, options=_options(2))
def test_training_in_a_split_group(rank: int) -> None:
    """Halves of the default group, which inherit its options.

    dist.split_group refuses groups without an accelerator. It, too, passes a name for each set.
    """
    dist.barrier()
    members = [0, 1] if rank < 2 else [2, 3]
    group = world().split_group(members, timedelta(seconds=OPERATION), group_name=f"{members}")
    backend = group._get_backend(CPU)
    assert (backend.rank(), backend.size()) == (rank % 2, 2)
    (ddp, compression), ledger = make_compressed(SHAPES, process_group=group), Ledger()
    for i in range(5):
        ledger.add(step(ddp, gradients(SHAPES, rank, i)), mean_gradients(SHAPES, members, i))
        dist.all_reduce(total := torch.tensor([rank]))  # the parent goes on
        assert total.item() == 6
    ledger.check(compression)
    assert (tp.stats()["steps"], tp.stats(group)["compressed_calls"]) == (0, 5)
    none = world().split_group([0, 1, 2], timedelta(seconds=OPERATION), group_name="three")
    assert (none is None) == (rank == 3)
    dist.barrier()
