# SPDX-License-Identifier: BSD-3-Clause
"""ZeroRedundancyOptimizer beside compressed gradients: on its own, and overlapped with DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support import ranks
from support.paired_training import digest, same
from support.synthetic import gradient

OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=2, matrix_approximation_rank=2)
STEPS = 8
# An overlapped optimizer waits until DDP has rebuilt its buckets and it has seen them once.
STEPS_BEFORE_OVERLAP = 2
# Each case says if a bucket's parameters are spread over the ranks, and if the graph is static.
OVERLAPPED = [(False, False), (True, False), (False, True)]


# Comparisons, a digest of the parameters, and the compressed calls or the parameters at first.
Facts = tuple[list[bool], str, int]
Overlapped = tuple[list[bool], str, str]
Hooked = tuple[list[bool], bool, int]


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


def _state(compression: tp.Compression) -> list[torch.Tensor]:
    saved = compression.state_dict()["parameters"].values()
    return [tensor for parameter in saved for tensor in (parameter["residual"], parameter["q"])]


def _beside(rank: int) -> Facts:
    """Trains with the whole optimizer on each rank, and with its parts, which are resumed."""
    whole, parts = _make(), _make()
    arguments: dict[str, Any] = {"lr": 1e-2, "weight_decay": 1e-3}
    adam = torch.optim.AdamW(whole.parameters(), **arguments)

    def make_zero() -> ZeroRedundancyOptimizer:
        return ZeroRedundancyOptimizer(parts.parameters(), torch.optim.AdamW, **arguments)

    zero, equal = make_zero(), []
    for ddp in (whole, parts):
        tp.attach(ddp, OPTIONS)
    for i in range(STEPS):
        if i == STEPS // 2:
            zero.consolidate_state_dict(to=0)
            saved: list[Any] = [zero.state_dict() if rank == 0 else None]
            dist.broadcast_object_list(saved, src=0)
            moments = [saved[0]["state"][k]["exp_avg"] for k in sorted(saved[0]["state"])]
            equal.append(same(moments, [s["exp_avg"] for s in adam.state_dict()["state"].values()]))
            zero = make_zero()
            zero.load_state_dict(saved[0])
        equal.append(same(_backward(whole, rank, i), _backward(parts, rank, i)))
        adam.step()
        zero.step()
        equal.append(same(whole.parameters(), parts.parameters()))
    return equal, digest(parts.parameters()), tp.stats()["compressed_calls"]


def _overlapped(rank: int, shard_buckets: bool, static_graph: bool) -> Overlapped:
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
    equal = []
    for i in range(STEPS):
        equal.append(same(_backward(plain, rank, i), _backward(overlapped, rank, i)))
        if i >= STEPS_BEFORE_OVERLAP + static_graph:
            sgd.step()
        equal.append(same(plain.parameters(), overlapped.parameters()))
    equal.append(same(_state(of_plain), _state(of_overlapped)))
    return equal, digest(overlapped.parameters()), digest(_make().parameters())


def _plain_hook(rank: int) -> Hooked:
    """Registering the hook in Python has the effect of attach."""
    attached, hooked = _make(), _make()
    of_attached = tp.attach(attached, OPTIONS)
    of_hooked = tp.attach(hooked, OPTIONS, register_hook=False)
    hooked.register_comm_hook(None, of_hooked.comm_hook)
    equal = []
    for i in range(STEPS):
        equal.append(same(_backward(attached, rank, i), _backward(hooked, rank, i)))
    state, steps = same(_state(of_attached), _state(of_hooked)), of_hooked.stats()["steps"]
    of_attached.detach()
    of_hooked.detach()
    for i in range(STEPS):
        equal.append(same(_backward(attached, rank, i), _backward(hooked, rank, i)))
    return equal, state, steps


def _all(rank: int) -> tuple[Facts, list[Overlapped], Hooked]:
    overlapped = [_overlapped(rank, *case) for case in OVERLAPPED]
    return _beside(rank), overlapped, _plain_hook(rank)


@pytest.fixture(scope="module")
def results() -> list[Any]:
    """The results of each function on both ranks. One launch runs all functions."""
    return list(zip(*ranks.run(2, _all), strict=True))


def test_in_parts_is_as_whole(results: list[Any]) -> None:
    first, second = results[0]
    for equal, _, compressed in (first, second):
        assert all(equal), equal
        assert compressed > 0
    assert first[1] == second[1]


def test_overlapped_is_as_after_backward(results: list[Any]) -> None:
    for mine, other in zip(*results[1], strict=True):
        for equal, _, _ in (mine, other):
            assert all(equal), equal
        assert mine[1] == other[1] != mine[2]


def test_comm_hook_is_what_attach_registers(results: list[Any]) -> None:
    for equal, state, steps in results[2]:
        assert all(equal)
        assert state
        assert steps == STEPS
