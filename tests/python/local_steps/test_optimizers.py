# SPDX-License-Identifier: BSD-3-Clause
"""Local steps with several optimizers, with wrappers of optimizers, and with a scaler."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn

import torch_powersgd as tp
from support.log_records import LogRecords
from support.on_ranks import models_agree, on_ranks
from support.paired_training import same
from support.synthetic import gradient

EVERY = 4
OPTIONS = {"matrix_approximation_rank": 2}


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24))


def _backward(model: nn.Module, rank: int, i: int, scale: float = 1.0) -> None:
    model.zero_grad()
    (model(gradient((6, 24), "input", rank, i)).square().mean() * scale).backward()


def _two(model: nn.Sequential) -> list[torch.optim.Optimizer]:
    vectors = [p for p in model.parameters() if p.ndim == 1]
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return [
        torch.optim.SGD(matrices, lr=0.1, momentum=0.5),
        torch.optim.SGD(vectors, lr=0.1, momentum=0.5),
    ]


@on_ranks(2)
def test_two_optimizers_train_as_one(rank: int) -> None:
    """To the bit, although each rank leaves out a step of one or of both."""
    models = [_net(), _net()]
    one = torch.optim.SGD(models[0].parameters(), lr=0.1, momentum=0.5)
    both = _two(models[1])
    steps = [
        tp.LocalSGD(models[0], one, EVERY, OPTIONS, warmup_steps=1),
        tp.LocalSGD(models[1], both, EVERY, OPTIONS, warmup_steps=1),
    ]
    for i in range(1 + 3 * EVERY):
        for model in models:
            _backward(model, rank, i)
        if i % 5 == 2 + rank:
            for each in steps:
                each.step_skipped()
        else:
            leaves_out = i % 5 == 3 - rank
            for parameter in (*models[0].parameters(), *models[1].parameters()):
                if leaves_out and parameter.ndim == 1:
                    parameter.grad = None
            one.step()
            for optimizer in both if i % 2 else both[::-1]:
                if leaves_out and optimizer is both[1]:
                    steps[1].step_skipped(optimizer)
                else:
                    optimizer.step()
        assert same(models[0].parameters(), models[1].parameters())
        assert models_agree(models[1]) is (i % EVERY == 0)
    assert [each.stats()["steps"] for each in steps] == [1 + 3 * EVERY] * 2
    for each in steps:
        each.detach()


@on_ranks(2)
def test_a_scaler_skips_steps_of_one_of_two(rank: int) -> None:
    model = _net()
    both = _two(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    steps = tp.LocalSGD(model, both, EVERY, OPTIONS, warmup_steps=0, scaler=scaler)
    for i in range(2 * EVERY):
        _backward(model, rank, i, float(scaler.scale(torch.ones(()))))
        if i % 3 == rank:
            both[i % 2].param_groups[0]["params"][0].grad.fill_(torch.inf)
        for optimizer in both:
            scaler.step(optimizer)
        scaler.update()
        assert steps.stats()["steps"] == i + 1
        assert models_agree(model) is ((i + 1) % EVERY == 0)


class _Lookahead(torch.optim.Optimizer):
    """Every second step goes half of the way back to the weights of two steps ago.

    It comes in two forms, as those in use do: only one of them calls Optimizer.__init__.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, has_hooks: bool) -> None:
        if has_hooks:
            super().__init__(optimizer.param_groups, {})
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups
        self.state = defaultdict(dict)
        self.slow = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
        self.steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        self.steps += 1
        if self.steps % 2 == 0:
            for slow, p in zip(self.slow, self.param_groups[0]["params"], strict=True):
                slow.lerp_(p.detach(), 0.5)
                p.data.copy_(slow)


@pytest.mark.parametrize("has_hooks", [True, False])
@on_ranks(2)
def test_a_round_follows_the_step_of_a_wrapper(rank: int, has_hooks: bool) -> None:
    model = _net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = _Lookahead(sgd, has_hooks)
    torch.optim.lr_scheduler.ConstantLR(sgd)
    steps = tp.LocalSGD(model, optimizer, 3, OPTIONS, warmup_steps=0)
    torch.optim.lr_scheduler.ConstantLR(optimizer)  # wraps step, too
    for i in range(6):
        _backward(model, rank, i)
        optimizer.step()
        assert models_agree(model) is (i % 3 == 2)
    steps.detach()
    _backward(model, rank, 0)
    optimizer.step()
    assert steps.stats()["steps"] == 6


@on_ranks(2)
def test_an_optimizer_that_takes_no_steps_is_noticed(rank: int) -> None:
    model, records = _net(), LogRecords()
    both = _two(model)
    with tp.LocalSGD(model, both, EVERY, OPTIONS):
        for i in range(25):
            _backward(model, rank, i)
            both[0].step()
        assert len(records.matching("Another of its optimizers took no step")) == 1


@on_ranks(2)
def test_creation_in_inference_mode_spoils_nothing(rank: int) -> None:
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.5)
    with torch.inference_mode():
        steps = tp.DiLoCo(model, optimizer, outer, 2, OPTIONS, warmup_steps=1)
    for i in range(7):
        _backward(model, rank, i)
        optimizer.step()
    assert models_agree(model)
    steps.detach()
