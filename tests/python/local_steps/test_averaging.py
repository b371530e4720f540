# SPDX-License-Identifier: BSD-3-Clause
"""While local steps run, nothing else averages, whatever a training loop asks of DDP.

DDP works over a group of its own, which counts its collectives.
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support.local_job import sgd
from support.log_records import LogRecords
from support.on_ranks import all_agree, on_ranks
from support.synthetic import gradient
from support.tensors import relative_error

OPTIONS = {"matrix_approximation_rank": 2}
EVERY = 3
Losses = Iterator[Callable[[], torch.Tensor]]


class _Net(nn.Module):
    """It has an unused parameter and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused, self.last = (nn.Linear(24, 24) for _ in range(3))
        self.norm = nn.BatchNorm1d(24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))  # type: ignore[no-any-return]


def _plain(ddp: Any, losses: Losses) -> None:
    next(losses)().backward()


def _no_sync(ddp: Any, losses: Losses) -> None:
    with ddp.no_sync():
        next(losses)().backward()
    next(losses)().backward()


def _sets_the_flag(ddp: Any, losses: Losses) -> None:
    """As nanoGPT does."""
    for last in (False, True):
        ddp.require_backward_grad_sync = last
        next(losses)().backward()


def _asks_in_backward(ddp: Any, losses: Losses) -> None:
    """As Accelerate's trigger_sync_in_backward does."""
    with ddp.no_sync():
        loss = next(losses)()
    ddp.require_backward_grad_sync = ddp.require_forward_param_sync = True
    ddp.reducer.prepare_for_backward([])
    loss.backward()


def _asks_by_hand(ddp: Any, losses: Losses) -> None:
    """As Lightning's manual optimization does."""
    ddp.require_backward_grad_sync = False
    loss = next(losses)()
    ddp.require_backward_grad_sync = ddp.require_forward_param_sync = True
    ddp.reducer._rebuild_buckets()
    ddp.reducer.prepare_for_backward([loss])
    loss.backward()


LOOPS = (_plain, _no_sync, _sets_the_flag, _asks_in_backward, _asks_by_hand)


def _losses(model: nn.Module, rank: int) -> Losses:
    for i in range(1000):
        batch = gradient((6, 24), "input", rank, i)
        yield functools.partial(_loss, model, batch)


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


def _grads(model: nn.Module) -> list[Any]:
    return [p.grad.tolist() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    "arguments",
    [{"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}],
    ids=lambda arguments: next(iter(arguments)),
)
@on_ranks(2)
def test_no_loop_makes_ddp_average(rank: int, arguments: dict[str, Any]) -> None:
    """Until the end. Then DDP averages gradients again, and broadcasts buffers."""
    group = dist.new_group(backend="gloo")

    def sent(call: Callable[..., Any], *args: Any) -> int:
        before: int = group._get_sequence_number_for_group()
        call(*args)
        return int(group._get_sequence_number_for_group()) - before

    cases = [*itertools.product(LOOPS, [0]), (_plain, 1), (_sets_the_flag, 3)]
    for loop, passes_before in cases:
        torch.manual_seed(0)
        model = _Net()
        if "find_unused_parameters" not in arguments:
            del model.unused
        ddp = DistributedDataParallel(model, process_group=group, **arguments)
        losses = _losses(ddp, rank)
        for _ in range(passes_before):
            _plain(ddp, losses)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        with tp.LocalSGD(ddp, optimizer, EVERY, OPTIONS, warmup_steps=1):
            for _ in range(EVERY + 2):
                optimizer.zero_grad()
                assert sent(loop, ddp, losses) == 0, loop
                assert not all_agree(_grads(ddp))
                optimizer.step()
        for _ in range(2):
            ddp.zero_grad()
            assert sent(_plain, ddp, losses) >= 2, loop
            assert all_agree(_grads(ddp)), loop
        model.norm.running_mean.fill_(rank)  # type: ignore[union-attr]
        assert sent(ddp.eval(), torch.randn(4, 24)) > 0
        assert all_agree(model.norm.running_mean.tolist())  # type: ignore[union-attr]


@on_ranks(2)
def test_a_wrapper_stops_wherever_it_is(rank: int) -> None:
    """Around the model that was passed, inside of it, made within no_sync, or made afterwards."""
    group = dist.new_group(backend="gloo")

    def wrap(model: nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(model, process_group=group)

    for where in ("around", "inside", "no_sync", "afterwards", "compiled"):
        model = _Net()
        del model.unused
        wrapper = wrap(model) if where != "afterwards" else None
        given: Any = model
        if wrapper and where != "around":
            given = nn.Sequential(wrapper) if where == "inside" else wrapper
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with wrapper.no_sync() if wrapper and where == "no_sync" else torch.enable_grad():
            steps = tp.LocalSGD(given, optimizer, EVERY, OPTIONS, warmup_steps=0)
        ddp: Any = wrapper or wrap(model)
        if where == "compiled":
            ddp = torch.compile(ddp, backend="eager")
        losses = _losses(ddp, rank)
        for i in range(EVERY + 1):
            optimizer.zero_grad()
            before = group._get_sequence_number_for_group()
            _plain(ddp, losses)
            # A wrapper that is made afterwards is found after the first step.
            assert (group._get_sequence_number_for_group() > before) is (
                where == "afterwards" and i == 0
            ), where
            optimizer.step()
        steps.detach()
        optimizer.zero_grad()
        _plain(ddp, losses)
        assert all_agree(_grads(model)), where


@on_ranks(2)
def test_a_wrapper_of_more_than_takes_local_steps_is_named(rank: int) -> None:
    model, records = _Net(), LogRecords()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.first.parameters(), lr=0.01)
    with tp.LocalSGD(model.first, optimizer, EVERY, OPTIONS):
        assert len(records.matching("DDP averages all gradients in every step, because 'unu")) == (
            rank == 0
        )
    del ddp


@on_ranks(2)
def test_a_copy_of_ddp_averages(rank: int) -> None:
    model = _Net()
    del model.unused
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    with tp.LocalSGD(ddp, optimizer, EVERY, OPTIONS):
        copied = copy.deepcopy(ddp)
        _plain(copied, _losses(copied, rank))
        assert all_agree(_grads(copied))
        model.norm.running_mean.fill_(rank)  # type: ignore[union-attr]


@on_ranks(2)
def test_attach_and_local_steps_take_turns(rank: int) -> None:
    ddp = DistributedDataParallel(nn.Linear(24, 24))
    optimizer, losses = torch.optim.SGD(ddp.parameters(), lr=0.01), _losses(ddp, rank)
    for _ in range(2):
        compression = tp.attach(ddp, {**OPTIONS, "start_powerSGD_iter": 0})
        _plain(ddp, losses)
        optimizer.step()
        assert all_agree(_grads(ddp))
        compression.detach()
        with tp.LocalSGD(ddp, optimizer, EVERY, OPTIONS, warmup_steps=0):
            optimizer.zero_grad()
            _plain(ddp, losses)
            optimizer.step()
            assert not all_agree(_grads(ddp))


@on_ranks(2)
def test_what_cannot_be_stopped_is_refused(rank: int) -> None:
    delayed = _Net()
    named = [("last.weight", delayed.last.weight)]
    hooked = DistributedDataParallel(
        delayed, delay_all_reduce_named_params=named, param_to_hook_all_reduce=delayed.first.weight
    )
    with pytest.raises(ValueError, match="do not work with DDP's delay_all_reduce_named_params"):
        tp.LocalSGD(hooked, torch.optim.SGD(hooked.parameters(), lr=0.01), EVERY)
    ddp = DistributedDataParallel(_Net())
    with (
        tp.LocalSGD(ddp, torch.optim.SGD(ddp.parameters(), lr=0.01), EVERY),
        ddp.join(),
        pytest.raises(ValueError, match=r"ddp.join\(\) does not work with local steps"),
    ):
        ddp(torch.randn(4, 24))


@on_ranks(2)
def test_buffers_are_averaged_exactly_whatever_the_scope(rank: int) -> None:
    """Also after a NaN on one rank, and with infinity where it means something."""
    model, records = nn.BatchNorm1d(6000), LogRecords(logging.WARNING)
    options = tp.Options(start_powerSGD_iter=0)
    group = dist.new_group(backend="cpu:powersgd", pg_options=options)
    model.register_buffer("mask", torch.full((3,), -torch.inf))
    optimizer = sgd(model)
    steps = tp.LocalSGD(model, optimizer, 1, {"scope": "attached"}, warmup_steps=0, group=group)
    buffers = dict(model.named_buffers())
    for i in range(3):
        both = [gradient((6000,), "buffer", r, i) for r in range(2)]
        buffers["running_mean"].copy_(both[rank])
        if rank == 1:
            buffers["running_mean"][17] = torch.nan
        with tp.scope("always"):
            steps.step_skipped()
        wanted = torch.stack(both).double().mean(0)
        wanted[17] = both[0][17]
        # One addition and one division in float32 round by less than one unit of 1e-7.
        assert relative_error(buffers["running_mean"], wanted) < 2e-7
        assert torch.equal(buffers["mask"], torch.full((3,), -torch.inf))
    mended = "'running_mean' is not finite on rank 1: it gets the mean of the ranks where it is"
    assert len(records.matching(mended)) == 3 * rank
