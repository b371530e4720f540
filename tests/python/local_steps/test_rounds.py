# SPDX-License-Identifier: BSD-3-Clause
"""Rounds of local steps: what is averaged, when, and that nothing of it is lost.

The optimizer is SGD with a learning rate of 1, so that a gradient is how far a step moves.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support.ddp import step
from support.ledger import TOLERANCE, Ledger, own_residuals_of, residuals_of
from support.log_records import LogRecords
from support.on_ranks import all_agree, models_agree, on_ranks
from support.synthetic import SHAPES, Synthetic, gradient, gradients
from support.tensors import Tensors, relative_error

EVERY = 4
OPTIONS = {"matrix_approximation_rank": 2}
EXACT = tp.Options(scope="never")
# Two rounds in four steps, on their way for three of them, so that two are at once.
IN_TURNS = {"fragments": 2, "fragment_sync_delay": 3, "warmup_steps": 0}


def _zeros(dtype: torch.dtype = torch.float32) -> Synthetic:
    return Synthetic({name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()})


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def _move(model: Synthetic, optimizer: torch.optim.Optimizer, rank: int, i: int) -> None:
    """Takes a step by the negative gradients of ``rank`` at ``i``."""
    for name, value in gradients(SHAPES, rank, i).items():
        parameter = model.weights[name]
        parameter.grad = -value.to(parameter.dtype)
    optimizer.step()


def _residuals(steps: tp.LocalSGD) -> Tensors:
    """The mean of what no round has sent yet of the movement, which is the negative change."""
    found: Tensors = {}
    for fragment in steps._fragments:
        found |= {name: -value for name, value in residuals_of(fragment.compression).items()}
    return found


def _kept(steps: tp.LocalSGD) -> Tensors:
    """The part of it that this process's parameters hold."""
    found: Tensors = {}
    for fragment in steps._fragments:
        for name, value in own_residuals_of(fragment.compression).items():
            found[name] = -fragment.kept * value.view(SHAPES[name])
    return found


def _mean(value: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(value)
    return value / dist.get_world_size()


def _anchors(steps: tp.LocalSGD) -> Tensors:
    found: Tensors = {}
    for fragment in steps._fragments:
        for name, anchor in fragment.anchors.items():
            found[name.removeprefix("weights.")] = anchor.double()
    return found


def _check(ledger: Ledger, residuals: Tensors) -> None:
    errors = ledger.errors(residuals)
    assert all(error < TOLERANCE[torch.float32] for error in errors.values()), errors


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("turns", [{"warmup_steps": 3}, IN_TURNS], ids=["whole", "in turns"])
@on_ranks()
def test_nothing_is_lost(rank: int, world_size: int, turns: dict[str, Any]) -> None:
    """The anchor + the mean residual = the sum of the mean movements.

    And a process's parameters are the anchor and its share of what it has not sent yet.
    """
    for wire in (None, "int8"):
        model = _zeros()
        optimizer = _sgd(model)
        steps = tp.LocalSGD(model, optimizer, EVERY, {**OPTIONS, "wire_dtype": wire}, **turns)
        ledger = Ledger()
        for i in range(3 + 3 * EVERY):
            again = i % EVERY  # each round makes the same movement, so the residual looks like it
            _move(model, optimizer, rank, again)
            mine = [gradients(SHAPES, r, again) for r in range(world_size)]
            means = {n: torch.stack([g[n].double() for g in mine]).mean(0) for n in SHAPES}
            ledger.add({n: torch.zeros(()) for n in SHAPES}, means)
        steps.sync()
        residuals, kept = _residuals(steps), _kept(steps)
        assert all(fragment.kept > 0.1 for fragment in steps._fragments if fragment.round_bytes)
        assert residuals
        assert all(residual.norm() > 0.1 for residual in residuals.values())
        ledger.outputs = _anchors(steps)
        _check(ledger, residuals)
        for name, parameter in model.weights.items():
            start = _anchors(steps)[name] + kept.get(name, torch.zeros(()))
            assert relative_error(parameter, start) < TOLERANCE[torch.float32], name
        steps.sync(exact=True)  # delivers what the parameters hold of it, and nothing else
        assert models_agree(model)
        ledger.outputs = {n: p.detach().double() for n, p in model.weights.items()}
        rest = {name: value - _mean(kept[name]) for name, value in residuals.items()}
        _check(ledger, rest)
        for name, residual in _residuals(steps).items():
            assert relative_error(residual, rest[name]) < TOLERANCE[torch.float32], name
        steps.detach()


@on_ranks(2)
def test_a_round_in_every_step_moves_the_anchors_as_attach_moves_parameters(rank: int) -> None:
    """With gradients that depend on nothing, up to the rounding of start - parameter."""
    model, ddp = _zeros(), DistributedDataParallel(_zeros())
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, ddp))
    steps = tp.LocalSGD(model, optimizer, 1, OPTIONS, warmup_steps=0)
    tp.attach(ddp, {**OPTIONS, "wire_dtype": "int4", "start_powerSGD_iter": 0})
    for i in range(8):
        values = gradients(SHAPES, rank, i)
        for name, value in values.items():
            model.weights[name].grad = value
        optimizer.step()
        step(ddp, values)
        other.step()
    for (name, mine), theirs in zip(_anchors(steps).items(), ddp.parameters(), strict=True):
        assert relative_error(mine, theirs) < 1e-4, name


def _outer(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


@on_ranks(2)
def test_diloco_is_an_outer_optimizer_over_the_mean_changes(rank: int) -> None:
    """Exact rounds equal the algorithm, written down in float64 for all processes."""
    dtype = torch.float64
    model = _zeros(dtype)
    optimizer = _sgd(model)
    outer = _outer(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(outer, 1, gamma=0.9)
    steps = tp.DiLoCo(model, optimizer, outer, EVERY, EXACT, warmup_steps=1)
    anchor = _zeros(dtype)
    reference = _outer(anchor.parameters())
    wanted = torch.optim.lr_scheduler.StepLR(reference, 1, gamma=0.9)
    _move(model, optimizer, rank, 0)
    for name, parameter in anchor.weights.items():
        parameter.data += sum(gradients(SHAPES, r, 0)[name].double() for r in range(2)) / 2
    for round_ in range(3):
        moved: Tensors = {name: torch.zeros((), dtype=dtype) for name in SHAPES}
        for i in range(1 + round_ * EVERY, 1 + (round_ + 1) * EVERY):
            _move(model, optimizer, rank, i)
            for name in SHAPES:
                both = [gradients(SHAPES, r, i)[name].double() for r in range(2)]
                moved[name] = moved[name] + torch.stack(both).mean(0)
        for name, parameter in anchor.weights.items():
            parameter.grad = -moved[name]
        reference.step()
        scheduler.step()
        wanted.step()
        for name, parameter in anchor.weights.items():
            assert relative_error(model.weights[name], parameter) < TOLERANCE[dtype], name
    assert steps.stats()["rounds"] == 4


@on_ranks(2)
def test_the_end_is_the_exact_mean_whatever_the_outer_optimizer(rank: int) -> None:
    """Also of what was loaded instead of the trained parameters, as the best of a training."""
    model = _zeros()
    optimizer = _sgd(model)
    with tp.DiLoCo(model, optimizer, _outer(model.parameters()), EVERY, OPTIONS, warmup_steps=0):
        for i in range(EVERY + 1):
            _move(model, optimizer, rank, i)
        for name, parameter in model.weights.items():
            parameter.data.copy_(gradient(parameter.shape, "best", name, rank))
    for name, parameter in model.weights.items():
        both = [gradient(parameter.shape, "best", name, r).double() for r in range(2)]
        assert relative_error(parameter, torch.stack(both).mean(0)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("sent", "delay", "limit"),
    [
        ({"matrix_approximation_rank": 16}, 0, 1e-3),
        ({"matrix_approximation_rank": 8}, 0, 0.1),
        ({"matrix_approximation_rank": 8}, 5, 0.1),
        ({"matrix_approximation_rank": 2}, 0, 0.4),
        ({"density": 1 / 16}, 0, 0.2),
        ({"density": 1 / 256}, 0, 0.2),
    ],
)
@on_ranks(2)
def test_adamw_is_no_faster_than_the_rounds(
    rank: int, sent: dict[str, Any], delay: int, limit: float
) -> None:
    """It learns a linear map of full rank, 64. Starting from the anchors, it would diverge.

    AdamW's steps don't get smaller with the gradient, so it would redo what the residual holds
    faster than the rounds send it. At matrix rank 2 it learns so slowly that rank 0 says so.
    """
    torch.manual_seed(0)
    records = LogRecords(logging.WARNING)
    target = torch.randn(64, 64) / 8
    model = nn.Linear(64, 64, bias=False)
    before = (model.weight.detach() - target).norm()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with tp.LocalSGD(model, optimizer, 20, fragment_sync_delay=delay, **sent):
        for i in range(400):
            inputs = gradient((32, 64), "input", rank, i)
            optimizer.zero_grad()
            (model(inputs) - inputs @ target.T).square().mean().backward()
            optimizer.step()
    error = (model.weight.detach() - target).norm() / before
    assert error < limit
    warnings = records.matching("mostly repeated what the factors had left out")
    matrix_rank = sent.get("matrix_approximation_rank")
    if matrix_rank != 8:  # which is on the verge
        assert len(warnings) == (rank == 0 and matrix_rank == 2)
    assert not records.matching("has mostly canceled")  # Both learn the same map.


@pytest.mark.parametrize(
    ("sent", "limit"), [({"matrix_approximation_rank": 8}, 0.1), ({"density": 1 / 16}, 1)]
)
@on_ranks(2)
def test_unlike_data_do_not_drive_the_model_away(
    rank: int, sent: dict[str, Any], limit: float
) -> None:
    """The limits are shares of the distance at which each process alone would end.

    In sums of factors, what the processes don't share cancels. Of the largest changes, each process
    sends others, as a warning says.
    """
    records = LogRecords(logging.WARNING)
    both = [gradient((64, 96), "target", r).double() for r in range(2)]
    optimum = torch.stack(both).mean(0)
    model = nn.Linear(96, 64, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with tp.LocalSGD(model, optimizer, 10, **sent):
        for i in range(1000):
            noise = gradient((64, 96), "noise", rank, i)
            model.weight.grad = model.weight.detach() - both[rank].float() + noise / 10
            optimizer.step()
    assert (model.weight - optimum).norm() < limit * (both[rank] - optimum).norm()
    warned = len(records.matching("has mostly canceled, as if their data were unlike"))
    assert warned == (rank == 0 and "density" in sent)


@on_ranks(2)
def test_the_defaults_are_those_of_local_steps(rank: int) -> None:
    """They take the place of the group's defaults, and of nothing that was set."""
    for own, wanted in (
        ({}, (32, "int4")),
        ({"wire_dtype": None}, (32, None)),
        ({"matrix_approximation_rank": 3}, (3, "int4")),
    ):
        group = dist.new_group(backend="cpu:powersgd", pg_options=own)
        for place, options in ((group, None), (None, own)):
            model = _zeros()
            steps = tp.LocalSGD(model, _sgd(model), EVERY, options, group=place)
            found = steps._fragments[0].compression.options
            assert (found.matrix_approximation_rank, found.wire_dtype) == wanted
            steps.detach()


@on_ranks(2)
def test_steps_beside_a_round_are_kept(rank: int) -> None:
    """A round of three steps before counts the steps since in the next round, once."""
    model = _zeros(torch.float64)
    optimizer = _sgd(model)
    steps = tp.LocalSGD(model, optimizer, 5, EXACT, fragment_sync_delay=3, warmup_steps=0)
    for i in range(10):
        _move(model, optimizer, rank, i)
        if i == 4:  # the mean of two steps, and three of its own
            for name, parameter in model.weights.items():
                both = [gradients(SHAPES, r, j)[name].double() for r in range(2) for j in range(2)]
                own = [gradients(SHAPES, rank, j)[name].double() for j in range(2, 5)]
                expected = torch.stack(both).sum(0) / 2 + torch.stack(own).sum(0)
                assert relative_error(parameter, expected) < TOLERANCE[torch.float64], name
    steps.sync()
    for name, parameter in model.weights.items():
        both = [gradients(SHAPES, r, j)[name].double() for r in range(2) for j in range(10)]
        expected = torch.stack(both).sum(0) / 2
        assert relative_error(parameter, expected) < TOLERANCE[torch.float64], name


class Odd(nn.Module):
    """Frozen, tied and unused parameters, several types, and buffers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(24)
        self.first = nn.Linear(24, 24, bias=False)
        self.last = nn.Linear(24, 24, bias=False)
        self.last.weight = self.first.weight
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.unused = nn.Linear(24, 30)
        self.low = nn.Parameter(0.1 * torch.randn(24, 40).bfloat16())
        self.complex = nn.Parameter(0.1 * torch.randn(24, 26, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.zeros(0, 5))
        self.register_buffer("constant", torch.randn(3), persistent=False)
        self.register_buffer("replaced", torch.zeros(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.replaced = x.mean(0)
        x = self.frozen(self.last(torch.tanh(self.first(self.norm(x)))))
        total: torch.Tensor = (x @ self.complex.abs()).square().mean()
        return total + (x.bfloat16() @ self.low).float().square().mean()


@pytest.mark.parametrize("average", [True, False], ids=["buffers averaged", "buffers left"])
@on_ranks(2)
def test_a_model_of_all_sorts(rank: int, average: bool) -> None:
    torch.manual_seed(rank)  # rank 1's parameters are not those of rank 0 at first
    model = Odd()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    steps = tp.LocalSGD(
        model, optimizer, EVERY, OPTIONS, fragments=2, average_buffers=average, warmup_steps=2
    )
    at_first = copy.deepcopy(model.state_dict())
    assert models_agree(model)
    for i in range(2 + 2 * EVERY):
        optimizer.zero_grad()
        model(gradient((8, 24), "input", rank, i)).backward()
        optimizer.step()
    steps.detach()
    after = model.state_dict()
    assert models_agree(model)
    for name in ("norm.running_mean", "replaced"):
        assert all_agree(after[name].tolist()) is average
    assert int(after["norm.num_batches_tracked"]) == 2 + 2 * EVERY
    for name, value in at_first.items():
        same = torch.equal(value, after[name])
        # weight decay moves an unused parameter in no process: it has no gradient
        assert same is (name.startswith(("frozen", "unused", "empty", "constant"))), name


@on_ranks(2)
def test_small_averages_add_up_in_bfloat16(rank: int) -> None:
    """The mean of half a unit of bfloat16 moves nothing in the first round, two units in four."""
    parameter = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    model = nn.ParameterList([parameter])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    tp.LocalSGD(model, optimizer, 1, EXACT, warmup_steps=0)
    unit = 2.0**-7  # the distance of 1 to the next larger number
    for i in range(4):
        parameter.grad = torch.full_like(parameter, 0 if rank else -unit)
        optimizer.step()
        assert torch.equal(parameter, torch.ones_like(parameter)) is (i == 0)
    assert torch.equal(parameter, torch.full_like(parameter, 1 + 2 * unit))
