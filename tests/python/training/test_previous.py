# SPDX-License-Identifier: BSD-3-Clause
"""``attach(previous=...)``: a job that goes on in a group of other processes loses no residual.

The gradients count in sums over the processes, because their number changes: the sum of outputs
times processes + the residuals of all processes = the sum of all gradients.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support import ranks
from support.ddp import step
from support.groups import world
from support.ledger import TOLERANCE, own_residuals_of
from support.on_ranks import all_agree, on_ranks
from support.states import own_part
from support.synthetic import SHAPES, Synthetic, gradients
from support.tensors import Tensors, add_to, relative_error
from torch_powersgd import grad_scaler
from torch_powersgd._core import _C
from torch_powersgd.targets import DdpTarget, misuse

OPTIONS: dict[str, Any] = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 1}


def _group(members: Iterable[int], device: str = "cpu") -> dist.ProcessGroup:
    backend = f"{device}:powersgd"
    group = dist.new_group(list(members), backend=backend, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _model(device: str = "cpu") -> Synthetic:
    return Synthetic({name: torch.zeros(shape, device=device) for name, shape in SHAPES.items()})


class _Job:
    """One process's part of a job whose gradients are known, of DDP or of named tensors."""

    def __init__(
        self, target: str, group: dist.ProcessGroup, device: str = "cpu", **options: Any
    ) -> None:
        self.model = _model(device)
        self.target, self.device = target, device
        self.attach(group, {**OPTIONS, **options})

    def attach(self, group: dist.ProcessGroup, options: Any = None, previous: Any = None) -> None:
        self.ddp: DistributedDataParallel | None = None
        if self.target == "ddp":
            self.ddp = DistributedDataParallel(self.model, process_group=group)
            self.compression = tp.attach(self.ddp, options, previous=previous)
        else:
            tensors = {name: weight.detach() for name, weight in self.model.weights.items()}
            self.compression = tp.attach(tensors, options, group=group, previous=previous)

    def move(self, group: dist.ProcessGroup) -> None:
        self.attach(group, previous=self.compression)

    def step(self, rank: int, i: int) -> Tensors:
        """The average of a step."""
        mine = gradients(SHAPES, rank, i)
        if self.ddp is not None:
            return step(self.ddp, mine)
        mine = {name: tensor.to(self.device) for name, tensor in mine.items()}
        self.compression.all_reduce(mine).wait()
        return mine

    def local(self) -> dict[str, dict[str, torch.Tensor]]:
        """The state of each compressed parameter in this process."""
        own = own_part(self.compression.state_dict(per_rank=True))
        return {name.removeprefix("weights."): s for name, s in own["parameters"].items()}

    def residuals(self) -> Tensors:
        found = own_residuals_of(self.compression)
        return {name: residual.view(SHAPES[name]) for name, residual in found.items()}


def _equal(one: dict[str, Tensors], other: dict[str, Tensors]) -> bool:
    """Whether two states are the same, bit for bit."""
    pairs = ((mine, other[name][part]) for name, s in one.items() for part, mine in s.items())
    return one.keys() == other.keys() and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs
    )


def _sum_over(tensors: Tensors, group: dist.ProcessGroup | None = None) -> Tensors:
    summed = {name: tensor.double().clone() for name, tensor in tensors.items()}
    for tensor in summed.values():
        dist.all_reduce(tensor, group=group)
    return summed


def stay_and_join(rank: int, target: str, wire: str | None, device: str) -> None:
    """Process 1 leaves after 5 steps, and a new one takes its place after 10."""
    sent: Tensors = {}
    wanted: Tensors = {}

    def train(job: _Job, steps: range, members: list[int]) -> None:
        for i in steps:
            add_to(sent, {n: len(members) * out for n, out in job.step(rank, i).items()})
            for member in members:
                add_to(wanted, gradients(SHAPES, member, i))

    job = _Job(target, world(), device, wire_dtype=wire)
    train(job, range(5), [0, 1, 2])
    mine = job.residuals()
    left = _sum_over({name: residual * (rank == 1) for name, residual in mine.items()})
    everyone = _group([0, 1, 2], device)
    if rank != 1:
        pair, former = _group([0, 2], device), job.compression
        job.move(pair)
        assert former.ended
        assert job.compression.group is pair
        train(job, range(5, 10), [0, 2])
        assert job.compression.stats()["steps"] == 10
        assert all_agree([state["q_warm"].tolist() for state in job.local().values()], pair)
        job.move(everyone)
    else:
        job = _Job(target, everyone, device, wire_dtype=wire)
    assert all_agree(job.compression._reducer.states.step)
    assert all_agree([state["q_warm"].tolist() for state in job.local().values()])
    train(job, range(10, 15), [0, 1, 2])
    residuals = _sum_over(job.residuals())
    assert all(residual.norm() > 0.1 for residual in residuals.values())
    if rank == 1:
        return  # it has not seen all steps
    for name, total in wanted.items():
        found = sent[name] + residuals.get(name, 0) + left.get(name, 0)
        assert relative_error(found, total) < 3 * TOLERANCE[torch.float32], name


@pytest.mark.parametrize("target", ["ddp", "tensors"])
@pytest.mark.parametrize("wire", [None, "int8"])
@on_ranks(3)
def test_who_stays_keeps_its_residual_and_who_joins_starts_with_none(
    rank: int, target: str, wire: str | None
) -> None:
    stay_and_join(rank, target, wire, "cpu")


def _dies_in_a_step(rank: int, discards: bool) -> dict[str, float] | None:
    """Process 1 dies in step 4. The others go on without it."""
    job = _Job("ddp", world(), allow_discard=discards)
    for i in range(4):
        job.step(rank, i)
    before = job.residuals()
    if rank == 1:
        os._exit(1)
    with pytest.raises((RuntimeError, dist.DistBackendError)):
        job.step(rank, 4)
    job.move(_group([0, 2]))
    if discards:
        job.compression.discard_step()
        return {name: relative_error(r, before[name]) for name, r in job.residuals().items()}
    job.compression.step_skipped()
    return {name: float(r.isfinite().all()) for name, r in job.residuals().items()}


@pytest.mark.parametrize("discards", [True, False])
def test_a_step_that_a_dead_process_has_broken_off(discards: bool) -> None:
    ended = ranks.outcomes(3, _dies_in_a_step, discards, op_timeout=30)
    assert ended[1].exitcode == 1
    for rank in (0, 2):
        assert ended[rank].value, ended[rank].error
        for value in ended[rank].value.values():
            assert value == (0 if discards else 1)


def _fail(*_: Any, **__: Any) -> None:
    raise ValueError("a fault of the test")


@pytest.mark.parametrize("place", ["hook", "agree_with", "register", "follow", "watch"])
@on_ranks(2)
def test_an_attach_that_fails_has_changed_nothing(rank: int, place: str) -> None:
    job, twin = _Job("ddp", world()), _Job("ddp", world())
    for i in range(3):
        job.step(rank, i)
        twin.step(rank, i)
    group, before = _group([0, 1]), job.local()
    start = tp.stats(group)["starts_at"]
    ddp = DistributedDataParallel(_model(), process_group=group)
    with pytest.MonkeyPatch.context() as patch:
        error = "a fault of the test"
        if place == "hook":
            error = "this DDP module already has a communication hook"
            if rank == 1:  # the other one learns it
                ddp.register_comm_hook(None, allreduce_hook)
        else:
            owners: list[Any] = [_C.ModelStates, DdpTarget, grad_scaler, misuse]
            owner = next(owner for owner in owners if hasattr(owner, place))
            patch.setattr(owner, place, _fail)
        for previous in (job.compression, None):
            if previous is None and place == "agree_with":
                continue  # nothing is shared
            options, scaler = None if previous else OPTIONS, torch.amp.GradScaler("cpu")
            with pytest.raises(ValueError, match=error):
                tp.attach(ddp, options, scaler=scaler, previous=previous)
    assert tp.stats(group)["starts_at"] == start > 1  # flat gradients are still compressed
    assert _equal(job.local(), before)
    outputs, expected = job.step(rank, 3), twin.step(rank, 3)
    assert all(torch.equal(output, expected[name]) for name, output in outputs.items())
    before = job.local()
    if place == "hook":
        ddp = DistributedDataParallel(_model(), process_group=group)
    job.ddp, job.compression = ddp, tp.attach(ddp, previous=job.compression)
    assert _equal(job.local(), before)
    outputs, expected = job.step(rank, 4), twin.step(rank, 4)
    assert all(torch.equal(output, expected[name]) for name, output in outputs.items())


@on_ranks(2)
def test_an_error_is_one_on_every_process_and_changes_nothing(rank: int) -> None:
    job = _Job("tensors", world())
    job.step(rank, 0)
    tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    fewer = dict(list(tensors.items())[:-1])
    group = _group([0, 1])
    other = tp.attach(fewer, OPTIONS, group=group)
    for previous, given, options, text in (
        (job.compression, fewer, None, "it has 'small' float32 .* where this module has nothing"),
        (other, tensors, None, "it has nothing where this module has 'small' float32"),
        (
            job.compression,
            tensors,
            {"matrix_approximation_rank": 3},
            "keeps the options of previous",
        ),
    ):
        if rank == 1:  # the other one learns it
            with pytest.raises(ValueError, match=text):
                tp.attach(given, options, group=group, previous=previous)
        else:
            with pytest.raises(ValueError, match=f"rank 1: .*{text}"):
                tp.attach(tensors, group=group, previous=job.compression)
    ended = tp.attach(fewer, OPTIONS, group=group)
    ended.detach()
    with pytest.raises(ValueError, match="previous can no longer be used: it was detached"):
        tp.attach(fewer, group=group, previous=ended)
    residuals = job.residuals()
    job.move(group)
    assert all(torch.equal(r, residuals[name]) for name, r in job.residuals().items())
