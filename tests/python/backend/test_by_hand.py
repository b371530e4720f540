# SPDX-License-Identifier: BSD-3-Clause
"""Loops that call all_reduce themselves: of gradients, of parameters, of outer gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support import ranks
from support.call_observer import compressed_calls, gloo
from support.paired_training import digest, same
from support.synthetic import (
    SHAPES,
    Ledger,
    Synthetic,
    Tensors,
    gradient,
    gradients,
    mean_gradients,
)

OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=2, matrix_approximation_rank=2, min_numel=64)
TOLERANCE = 1e-5  # the identity in float32, as in test_identity
# As in test_identity, gradients that are almost zero let the residual drain. Each step takes two of
# at most 16 dimensions.
STEPS, DRAIN_STEPS, QUIET = 6, 24, 1e-20


def _average(tensors: Tensors, asynchronous: bool = False) -> None:
    works = [dist.all_reduce(tensor, async_op=asynchronous) for tensor in tensors.values()]
    for work, tensor in zip(works, tensors.values(), strict=True):
        if work is not None:
            work.wait()
        tensor /= dist.get_world_size()


def _gradient_loop(
    rank: int, asynchronous: bool
) -> tuple[dict[str, float], dict[str, float], list[str], int]:
    model = Synthetic({name: torch.zeros(shape) for name, shape in SHAPES.items()})
    ledger, replica = Ledger(), []
    for i in range(STEPS + DRAIN_STEPS):
        quiet = 1 if i < STEPS else QUIET
        model.zero_grad()
        model({name: quiet * g for name, g in gradients(SHAPES, rank, i).items()}).backward()
        found = {name: parameter.grad for name, parameter in model.weights.items()}
        with tp.scope("always"):
            _average(found, asynchronous)
        means = mean_gradients(SHAPES, dist.get_world_size(), i)
        ledger.add(found, {name: quiet * mean for name, mean in means.items()})
        replica.append(digest(found.values()))
        if i == STEPS - 1:
            before_drain = ledger.errors()
    return before_drain, ledger.errors(), replica, compressed_calls()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_loop_over_gradients_delivers_everything_in_the_end(asynchronous: bool) -> None:
    results = ranks.run(3, _gradient_loop, asynchronous, options=OPTIONS)
    for before_drain, errors, replica, compressed in results:
        for name in ("conv", "wide", "tall"):
            assert before_drain[name] > 0.05, before_drain  # compression did delay
        assert max(errors.values()) < TOLERANCE, errors
        assert replica == results[0][2]
        assert compressed == 3 * (STEPS + DRAIN_STEPS - OPTIONS.start_powerSGD_iter)


def _outside_of_a_block(rank: int) -> tuple[bool, int]:
    """The same loop in plain code: the default scope does not compress it."""
    mine = gradients(SHAPES, rank, 0)
    wanted = {name: tensor.clone() for name, tensor in mine.items()}
    _average(mine)
    for tensor in wanted.values():
        dist.all_reduce(tensor, group=gloo())
        tensor /= dist.get_world_size()
    return same(mine.values(), wanted.values()), compressed_calls()


def test_a_loop_outside_of_a_block_is_exact() -> None:
    options = tp.Options.hook_defaults(start_powerSGD_iter=0, min_numel=64)
    assert ranks.run(2, _outside_of_a_block, options=options) == [(True, 0)] * 2


LOCAL_FROM = 5  # from this step on the ranks' gradients are not averaged


def _post_local_sgd(rank: int) -> tuple[list[int], list[bool], list[str]]:
    """torch's recipe: averaged gradients at first, then local steps, and averaged parameters."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24))
    ddp = DistributedDataParallel(net)
    alone = [dist.new_group([member], backend="gloo") for member in range(dist.get_world_size())]
    state = PostLocalSGDState(None, alone[rank], LOCAL_FROM, post_local_gradient_allreduce=False)
    ddp.register_comm_hook(state, post_localSGD_hook)
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    averager = PeriodicModelAverager(period=3, warmup_steps=LOCAL_FROM)
    optimizer = PostLocalSGDOptimizer(sgd, averager)
    averaged: list[bool] = []
    optimizer.averager = _Compared(averager, averaged)  # type: ignore[assignment]
    calls, replica = [], []
    for i in range(14):
        ddp.zero_grad()
        ddp(gradient((6, 24), "input", rank, i)).square().mean().backward()
        optimizer.step()
        calls.append(compressed_calls())
        replica.append(digest(net.parameters()))
    return calls, averaged, replica


class _Compared:
    """Compares the parameters that an averager makes with those that Gloo makes."""

    def __init__(self, averager: PeriodicModelAverager, equal: list[bool]) -> None:
        self.averager, self.equal = averager, equal

    def average_parameters(self, params: list[dict[str, Any]]) -> None:
        parameters = [p for group in params for p in group["params"]]
        copies = [nn.Parameter(p.detach().clone()) for p in parameters]
        before = digest(copies)
        self.averager.average_parameters(params)
        if digest(parameters) != before:
            average_parameters(iter(copies), gloo())
            self.equal.append(same(parameters, copies))


def test_post_local_sgd_averages_parameters_exactly() -> None:
    first, second = ranks.run(2, _post_local_sgd, options=OPTIONS)
    for calls, averaged, _ in (first, second):
        assert calls[LOCAL_FROM - 1] > 0  # flat gradients
        assert len(set(calls[LOCAL_FROM:])) == 1  # and no parameters
        assert averaged == [True] * 3
    # Equal while gradients are averaged, then whenever parameters are.
    equal = [a == b for a, b in zip(first[2], second[2], strict=True)]
    assert equal == [i < LOCAL_FROM or (i - LOCAL_FROM) % 3 == 0 for i in range(14)]


OUTER_STEPS = 8


def _diloco(rank: int, compress: bool) -> tuple[list[bool], dict[str, float], list[str], int]:
    """Some local steps, then an outer step on the mean of the ranks' changes."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 30), nn.Tanh(), nn.Linear(30, 12))
    anchor = nn.ParameterList(nn.Parameter(p.detach().clone()) for p in net.parameters())
    outer = torch.optim.SGD(anchor.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    ledger, equal, replica = Ledger(), [], []
    for i in range(OUTER_STEPS + DRAIN_STEPS):
        inner = torch.optim.AdamW(net.parameters(), lr=1e-2)
        for k in range(3):
            net.zero_grad()
            net(gradient((6, 12), "input", rank, i, k)).square().mean().backward()
            inner.step()
        with torch.no_grad():
            quiet = 1 if i < OUTER_STEPS else QUIET
            changed = {
                str(n): quiet * (was - now)
                for n, (was, now) in enumerate(zip(anchor, net.parameters(), strict=True))
            }
        wanted = {name: tensor.clone() for name, tensor in changed.items()}
        for tensor in wanted.values():
            dist.all_reduce(tensor, group=gloo())
            tensor /= dist.get_world_size()
        if compress:
            with tp.scope("always"):
                _average(changed)
        else:
            _average(changed)
        ledger.add(changed, wanted)
        equal.append(same(changed.values(), wanted.values()))
        for parameter, tensor in zip(anchor, changed.values(), strict=True):
            parameter.grad = tensor
        outer.step()
        with torch.no_grad():
            for now, was in zip(net.parameters(), anchor, strict=True):
                now.copy_(was)
        replica.append(digest(net.parameters()))
    return equal, ledger.errors(), replica, compressed_calls()


def test_outer_gradients_are_exact_by_default() -> None:
    first, second = ranks.run(2, _diloco, False, options=OPTIONS)
    assert all(first[0])
    assert first[2] == second[2]
    assert first[3] == 0


def test_outer_gradients_that_are_compressed_are_delivered_in_the_end() -> None:
    first, second = ranks.run(2, _diloco, True, options=OPTIONS)
    for equal, errors, _, compressed in (first, second):
        warm_up = OPTIONS.start_powerSGD_iter
        assert equal[:OUTER_STEPS] == [True] * warm_up + [False] * (OUTER_STEPS - warm_up)
        assert max(errors.values()) < TOLERANCE, errors
        assert compressed == 2 * (OUTER_STEPS + DRAIN_STEPS - warm_up)
    assert first[2] == second[2]
