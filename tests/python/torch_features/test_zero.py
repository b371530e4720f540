# SPDX-License-Identifier: BSD-3-Clause
"""ZeroRedundancyOptimizer, whose parts lie on the ranks, with DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support.ledger import residuals_of
from support.on_ranks import all_agree, on_ranks
from support.synthetic import gradient
from support.tensors import digest, same

OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=2, matrix_approximation_rank=2)
STEPS = 8
# An overlapped optimizer waits until DDP has rebuilt its buckets and it has seen them once.
STEPS_BEFORE_OVERLAP = 2


def _make(static_graph: bool = False) -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = torch.nn.Linear(24, 33), torch.nn.Tanh(), torch.nn.Linear(33, 20)
    # Buckets of 1 kB: there are several, with different parts of the optimizer.
    return DistributedDataParallel(
        torch.nn.Sequential(*layers), bucket_cap_mb=1e-3, static_graph=static_graph
    )


def _backward(ddp: DistributedDataParallel, rank: int, i: int) -> list[torch.Tensor]:
    ddp.zero_grad()
    ddp(gradient((6, 24), "input", rank, i)).square().mean().backward()
    return [p.grad.clone() for p in ddp.parameters() if p.grad is not None]


@on_ranks(2)
def test_in_parts_is_as_whole(rank: int) -> None:
    """Trains with the whole optimizer on each rank, and with its parts, which are resumed."""
    whole, parts = _make(), _make()
    arguments: dict[str, Any] = {"lr": 1e-2, "weight_decay": 1e-3}
    adam = torch.optim.AdamW(whole.parameters(), **arguments)

    def make_zero() -> ZeroRedundancyOptimizer:
        return ZeroRedundancyOptimizer(parts.parameters(), torch.optim.AdamW, **arguments)

    zero = make_zero()
    for ddp in (whole, parts):
        tp.attach(ddp, OPTIONS)
    for i in range(STEPS):
        if i == STEPS // 2:
            zero.consolidate_state_dict(to=0)
            saved: list[Any] = [zero.state_dict() if rank == 0 else None]
            dist.broadcast_object_list(saved, src=0)
            moments = [saved[0]["state"][k]["exp_avg"] for k in sorted(saved[0]["state"])]
            assert same(moments, [s["exp_avg"] for s in adam.state_dict()["state"].values()])
            zero = make_zero()
            zero.load_state_dict(saved[0])
        assert same(_backward(whole, rank, i), _backward(parts, rank, i))
        adam.step()
        zero.step()
        assert same(whole.parameters(), parts.parameters())
    assert tp.stats()["compressed_calls"] > 0
    assert all_agree(digest(parts.parameters()))


@pytest.mark.parametrize(
    ("shard_buckets", "static_graph"),
    [(False, False), (True, False), (False, True)],
    ids=["buckets", "spread buckets", "static graph"],
)
@on_ranks(2)
def test_overlapped_is_as_after_backward(
    rank: int, shard_buckets: bool, static_graph: bool
) -> None:
    """Compares with training without overlap, which leaves out the steps that torch leaves out."""
    plain, overlapped = _make(static_graph), _make(static_graph)
    arguments: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
    sgd = torch.optim.SGD(plain.parameters(), **arguments)
    zero = ZeroRedundancyOptimizer(
        overlapped.parameters(), torch.optim.SGD, overlap_with_ddp=True, **arguments
    )
    of_plain = tp.attach(plain, OPTIONS)
    of_overlapped = tp.attach(overlapped, OPTIONS, register_hook=False)
    hook = hook_with_zero_step(of_overlapped.comm_hook, overlapped, zero, shard_buckets)
    overlapped.register_comm_hook(None, hook)
    before = digest(overlapped.parameters())
    for i in range(STEPS):
        assert same(_backward(plain, rank, i), _backward(overlapped, rank, i))
        if i >= STEPS_BEFORE_OVERLAP + static_graph:
            sgd.step()
        assert same(plain.parameters(), overlapped.parameters())
    assert same(residuals_of(of_plain).values(), residuals_of(of_overlapped).values())
    assert all_agree(digest(overlapped.parameters()))
    assert digest(overlapped.parameters()) != before
