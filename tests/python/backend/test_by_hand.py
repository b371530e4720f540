# SPDX-License-Identifier: BSD-3-Clause
"""Loops that call all_reduce themselves: of gradients, and of parameters."""

from __future__ import annotations

from typing import Any

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
from support.groups import compressed_calls, gloo
from support.ledger import TOLERANCE, Ledger
from support.on_ranks import all_agree, on_ranks
from support.synthetic import SHAPES, gradient, gradients, mean_gradients
from support.tensors import Tensors, digest, same

OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=2, matrix_approximation_rank=2, min_numel=64)
# As in test_identity, gradients that are almost zero let the residual drain. Each step takes two of
# at most 16 dimensions.
STEPS, DRAIN_STEPS, QUIET = 6, 24, 1e-20


def _average(tensors: Tensors) -> None:
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors.values()]
    for work, tensor in zip(works, tensors.values(), strict=True):
        work.wait()
        tensor /= dist.get_world_size()


@on_ranks(3, options=OPTIONS)
def test_a_loop_over_gradients_delivers_everything_in_the_end(rank: int) -> None:
    ledger = Ledger()
    for i in range(STEPS + DRAIN_STEPS):
        quiet = 1 if i < STEPS else QUIET
        found = {name: quiet * g for name, g in gradients(SHAPES, rank, i).items()}
        with tp.scope("always"):
            _average(found)
        means = mean_gradients(SHAPES, dist.get_world_size(), i)
        ledger.add(found, {name: quiet * mean for name, mean in means.items()})
        if i == STEPS - 1:
            delayed = {name: error for name, error in ledger.errors().items() if error > 0.05}
            assert delayed.keys() == {"conv", "wide", "tall"}, "compression delays"
        assert all_agree(digest(found.values()))
    assert max(ledger.errors().values()) < TOLERANCE[torch.float32], ledger.errors()
    assert compressed_calls() == 3 * (STEPS + DRAIN_STEPS - OPTIONS.start_powerSGD_iter)


@on_ranks(options=tp.Options.hook_defaults(start_powerSGD_iter=0, min_numel=64))
def test_a_loop_outside_of_a_block_is_exact(rank: int) -> None:
    mine = gradients(SHAPES, rank, 0)
    wanted = {name: tensor.clone() for name, tensor in mine.items()}
    _average(mine)
    for tensor in wanted.values():
        dist.all_reduce(tensor, group=gloo())
        tensor /= dist.get_world_size()
    assert same(mine.values(), wanted.values())
    assert compressed_calls() == 0


LOCAL_FROM = 5  # from this step on the ranks' gradients are not averaged


class _Compared(PeriodicModelAverager):
    """Compares the parameters that it makes with those that Gloo makes."""

    def average_parameters(self, params: Any) -> None:
        parameters = [p for group in params for p in group["params"]]
        copies = [nn.Parameter(p.detach().clone()) for p in parameters]
        before = digest(copies)
        super().average_parameters(params)
        if digest(parameters) != before:
            average_parameters(iter(copies), gloo())
            assert same(parameters, copies)


@on_ranks(options=OPTIONS)
def test_post_local_sgd_averages_parameters_exactly(rank: int) -> None:
    """torch's recipe: averaged gradients at first, then local steps, and averaged parameters."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24))
    ddp = DistributedDataParallel(net)
    alone = [dist.new_group([member], backend="gloo") for member in range(2)]
    state = PostLocalSGDState(None, alone[rank], LOCAL_FROM, post_local_gradient_allreduce=False)
    ddp.register_comm_hook(state, post_localSGD_hook)
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    optimizer = PostLocalSGDOptimizer(sgd, _Compared(period=3, warmup_steps=LOCAL_FROM))
    calls = []
    for i in range(14):
        ddp.zero_grad()
        ddp(gradient((6, 24), "input", rank, i)).square().mean().backward()
        optimizer.step()
        calls.append(compressed_calls())
        averages = i < LOCAL_FROM or (i - LOCAL_FROM) % 3 == 0
        assert all_agree(digest(net.parameters())) == averages
    assert calls[LOCAL_FROM - 1] > 0  # flat gradients
    assert calls[LOCAL_FROM] == calls[-1]  # and no parameters
