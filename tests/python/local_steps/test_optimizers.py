# SPDX-License-Identifier: BSD-3-Clause
"""Local steps with several optimizers, with wrappers of optimizers, and with a scaler."""

from __future__ import annotations

import copy
import gc
import inspect
import logging
import weakref
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support.local_job import EVERY, EXACT, OPTIONS, backward, make_net, sgd, take_step
from support.log_records import LogRecords
from support.on_ranks import models_agree, on_ranks
from support.synthetic import gradient
from support.tensors import relative_error, same
from torch_powersgd import grad_scaler


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
    models = [make_net(), make_net()]
    one = torch.optim.SGD(models[0].parameters(), lr=0.1, momentum=0.5)
    both = _two(models[1])
    steps = [
        tp.LocalSGD(models[0], one, EVERY, EXACT, warmup_steps=1),
        tp.LocalSGD(models[1], both, EVERY, EXACT, warmup_steps=1),
    ]
    for i in range(1 + 3 * EVERY):
        for model in models:
            backward(model, rank, i)
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
    model = make_net()
    both = _two(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    steps = tp.LocalSGD(model, both, EVERY, EXACT, warmup_steps=0, scaler=scaler)
    for i in range(2 * EVERY):
        backward(model, rank, i, float(scaler.scale(torch.ones(()))))
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
    model = make_net()
    inner = sgd(model)
    optimizer = _Lookahead(inner, has_hooks)
    torch.optim.lr_scheduler.ConstantLR(inner)
    steps = tp.LocalSGD(model, optimizer, 3, EXACT, warmup_steps=0)
    torch.optim.lr_scheduler.ConstantLR(optimizer)  # wraps step, too
    for i in range(6):
        take_step(model, optimizer, rank, i)
        assert models_agree(model) is (i % 3 == 2)
    steps.detach()
    take_step(model, optimizer, rank, 0)
    assert steps.stats()["steps"] == 6


@on_ranks(2)
def test_an_optimizer_that_takes_no_steps_is_noticed(rank: int) -> None:
    model, records = make_net(), LogRecords()
    both = _two(model)
    with tp.LocalSGD(model, both, EVERY, OPTIONS):
        for i in range(25):
            backward(model, rank, i)
            both[0].step()
        assert len(records.matching("Another of its optimizers took no step")) == (rank == 0)


@on_ranks(2)
def test_creation_in_inference_mode_spoils_nothing(rank: int) -> None:
    model = make_net()
    optimizer = sgd(model)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.5)
    with torch.inference_mode():
        steps = tp.DiLoCo(model, optimizer, outer, 2, OPTIONS, warmup_steps=1)
    for i in range(7):
        take_step(model, optimizer, rank, i)
    steps.detach()
    assert models_agree(model)


class _Masters(torch.optim.SGD):
    """Steps from weights of its own, as mixed-precision optimizers with float32 masters do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"]):
            state = self.state[parameter]
            state.setdefault("master", parameter.detach().clone())
            state["master"] -= self.param_groups[0]["lr"] * parameter.grad
            parameter.data.copy_(state["master"])


@on_ranks(2)
def test_an_optimizer_that_holds_weights_is_named(rank: int) -> None:
    """Others, whose states have the shapes of the parameters too, are not."""
    names: dict[Any, bool] = {
        _Masters: True,
        torch.optim.ASGD: True,  # averages the weights
        torch.optim.AdamW: False,
        torch.optim.Adagrad: False,
        torch.optim.Rprop: False,
        torch.optim.Adadelta: False,
    }
    for kind, holds in names.items():
        model, records = make_net(), LogRecords(logging.WARNING)
        optimizer = kind(model.parameters(), lr=0.01)
        with tp.LocalSGD(model, optimizer, EVERY, OPTIONS, warmup_steps=0):
            for i in range(2 * EVERY):
                take_step(model, optimizer, rank, i)
        found = records.matching(f"{kind.__name__} holds weights of its own")
        assert len(found) == (holds and rank == 0), kind


@on_ranks(2)
def test_parameters_that_one_side_lacks_are_named(rank: int) -> None:
    """As those of the second of two optimizers that was forgotten."""
    model, records = make_net(), LogRecords(logging.WARNING)
    weight, *others = dict(model.named_parameters())
    tp.LocalSGD(model, torch.optim.SGD([model.get_parameter(weight)]), EVERY, OPTIONS).detach()
    found = records.matching(f"not hold {len(others)} of the .*, the first of them '{others[0]}'")
    assert len(found) == (rank == 0)
    everything = [*model.parameters(), *nn.Linear(3, 5).parameters()]
    optimizer = torch.optim.SGD(everything, lr=0.1)
    tp.LocalSGD(model, optimizer, EVERY, OPTIONS).detach()
    found = records.matching(r"2 parameters of the optimizer, the first of shape \[5, 3\], are not")
    assert len(found) == (rank == 0)


@on_ranks(3)
def test_frozen_parameters_that_change_are_averaged_at_the_end(rank: int) -> None:
    """Those of a teacher, of which rank 2 alone has one that doesn't change."""
    model = nn.ModuleDict({"student": make_net(), "teacher": make_net(), "base": make_net()})
    for name in ("teacher", "base"):
        model[name].requires_grad_(False)
    base = [p.clone() for p in model["base"].parameters()]
    optimizer = torch.optim.SGD(model["student"].parameters(), lr=0.1)
    teacher = dict(model["teacher"].named_parameters())
    with tp.LocalSGD(model, optimizer, EVERY, OPTIONS, warmup_steps=0):
        for name, parameter in teacher.items():
            if rank < 2 or name != "2.bias":
                parameter.data += gradient(parameter.shape, "change", name, rank)
    at_first = dict(make_net().named_parameters())
    for name, parameter in teacher.items():
        ranks = range(2 if name == "2.bias" else 3)
        changes = [gradient(parameter.shape, "change", name, r).double() for r in ranks]
        wanted = at_first[name] + torch.stack(changes).sum(0) / 3
        # Three roundings of float32.
        assert relative_error(parameter, wanted) < 3e-7, name
    assert models_agree(model)
    assert same(model["base"].parameters(), base)  # a mean of three equal numbers may differ


@pytest.mark.parametrize("fused", [False, True], ids=["skipped by the scaler", "by the optimizer"])
@on_ranks(2)
def test_a_scaler_that_skips_on_one_rank_keeps_the_rounds(rank: int, fused: bool) -> None:
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    steps = tp.LocalSGD(model, optimizer, EVERY, EXACT, warmup_steps=0, scaler=scaler)
    for i in range(3 * EVERY):
        backward(model, rank, i, float(scaler.scale(torch.ones(()))))
        if rank == 1 and i % 5 == 2:
            list(model.parameters())[0].grad.fill_(torch.inf)  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()
        assert models_agree(model) is ((i + 1) % EVERY == 0)
    assert steps.stats()["steps"] == 3 * EVERY
    copied = copy.deepcopy(scaler)  # for another training, whose steps do not count here
    steps.detach()
    for other in (copied, scaler):
        backward(model, rank, 0, float(other.scale(torch.ones(()))))
        other.step(optimizer)
        other.update()
    assert steps.stats()["steps"] == 3 * EVERY
    fragment = weakref.ref(steps._fragments[0])
    del steps
    gc.collect()
    assert fragment() is None  # although the scaler lives


@on_ranks(2)
def test_a_scaler_counts_what_it_skips_after_a_step_without_it(rank: int) -> None:
    model = make_net()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=8.0)
    steps = tp.LocalSGD(model, optimizer, EVERY, EXACT, warmup_steps=0, scaler=scaler)
    for i in range(EVERY):
        backward(model, rank, i, float(scaler.scale(torch.ones(()))))
        if i % 2 == 0:  # on all ranks
            optimizer.step()
            continue
        if rank == 1:
            list(model.parameters())[0].grad.fill_(torch.inf)  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()
    assert steps.stats()["steps"] == EVERY
    assert models_agree(model)


@on_ranks(1)
def test_one_scaler_serves_any_number_of_trainings(rank: int) -> None:
    """It forgets those that have ended. Each wrapper of its own would take a frame of the stack."""
    model, scaler = make_net(), torch.amp.GradScaler("cpu", init_scale=8.0)
    ddp = DistributedDataParallel(make_net())
    optimizer, of_ddp = sgd(model), sgd(ddp)
    depths: list[int] = []
    for each in (optimizer, of_ddp):
        each.register_step_pre_hook(lambda *_: depths.append(len(inspect.stack(0))))
    for _ in range(5):
        tp.LocalSGD(model, optimizer, EVERY, scaler=scaler).detach()
        tp.attach(ddp, scaler=scaler).detach()
        gc.collect()
        for module, stepped in ((model, optimizer), (ddp, of_ddp)):
            backward(module, rank, 0, float(scaler.scale(outputs=torch.ones(()))))
            scaler.step(stepped)
        scaler.update()
    assert depths == depths[:2] * 5
    assert not grad_scaler._wrapped[scaler].step
