# SPDX-License-Identifier: BSD-3-Clause
"""``ProcessGroupPowerSGD`` by hand, with a manager that does what a test says.

The sum of outputs times participants + the residuals of all replicas = the sum of all gradients of
the steps that were committed.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("torchft")

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torchft.local_sgd import DiLoCo

from support.deadline import OPERATION
from support.on_ranks import on_ranks
from support.synthetic import (
    COMPRESSED,
    SHAPES,
    TOLERANCE,
    Synthetic,
    Tensors,
    add_to,
    gradients,
    own_residuals_of,
    relative_error,
)
from torch_powersgd.integrations.torchft import (
    DistributedDataParallel,
    ProcessGroupPowerSGD,
)
from torch_powersgd.targets import shard_of

LIMIT = timedelta(seconds=OPERATION)


class _Manager:
    """Averages over the replicas of the process group, and counts what it is told to commit."""

    _use_async_quorum = False

    def __init__(self, group: ProcessGroupPowerSGD) -> None:
        self.group, self.step, self.participates = group, 0, True
        self.participants = 1
        self.commits = True

    def current_step(self) -> int:
        return self.step

    def allreduce(self, tensor: torch.Tensor, should_quantize: bool = False) -> Any:
        if not self.participates:
            tensor.zero_()
        work = self.group.allreduce([tensor], dist.ReduceOp.SUM)
        return _Mean(work, tensor, self.participants)

    def should_commit(self) -> bool:
        self.step += self.commits
        return self.commits

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None  # what else a DiLoCo calls


class _Mean:
    def __init__(self, work: Any, tensor: torch.Tensor, participants: int) -> None:
        self.work, self.tensor, self.participants = work, tensor, participants

    def wait(self) -> None:
        self.work.wait()
        self.tensor /= self.participants


class _Gradients:
    """Gradients that the backward pass of a module averages."""

    def __init__(self, module: Any, manager: _Manager) -> None:
        self.module, self.manager = module, manager

    def average(self, coefficients: Tensors) -> Tensors:
        self.module(coefficients).backward()
        self.manager.should_commit()
        model = getattr(self.module, "module", self.module)
        outputs = {name: shard_of(model.weights[name].grad).clone() for name in coefficients}
        self.module.zero_grad()
        return outputs


class _Changes:
    """Changes that a DiLoCo of one step averages."""

    def __init__(self, model: Synthetic, manager: Any) -> None:
        self.model, self.manager, self.outputs = model, manager, Tensors()
        self.inner = torch.optim.SGD(model.parameters(), lr=1)
        outer = torch.optim.SGD(model.parameters(), lr=1)
        outer.register_step_pre_hook(self._note)
        self.diloco = DiLoCo(manager, [model], self.inner, outer, sync_every=1)

    def average(self, coefficients: Tensors) -> Tensors:
        self.model(coefficients).backward()
        with self.diloco:
            self.inner.step()
        return self.outputs

    def _note(self, *_: Any) -> None:
        self.outputs = {name: weight.grad for name, weight in self.model.weights.items()}


class _Replica:
    def __init__(self, rank: int, kind: str, wire: str | None) -> None:
        self.rank = rank
        options = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 1, "wire_dtype": wire}
        self.group = ProcessGroupPowerSGD(LIMIT, options)
        self.manager = _Manager(self.group)
        model = Synthetic({name: torch.zeros(shape) for name, shape in SHAPES.items()})
        stand_in: Any = self.manager
        if kind == "ddp":
            ddp = DistributedDataParallel(stand_in, model, bucket_cap_mb=0.002)
            self.averages: Any = _Gradients(ddp, stand_in)
            self.compression = self.group.attach(ddp, stand_in)
        elif kind == "fsdp":
            own = dist.new_group([rank], use_local_synchronization=True)
            sharded = fully_shard(model, mesh=DeviceMesh.from_group(own, "cpu"))
            self.averages = _Gradients(sharded, stand_in)
            self.compression = self.group.attach(sharded, stand_in)
        else:
            self.averages = _Changes(model, stand_in)
            (self.compression,) = self.group.attach_diloco(self.averages.diloco, stand_in)
        self.sent: Tensors = {}
        self.wanted: Tensors = {}

    def join(self, address: str, quorum: int, members: list[int], new: list[int]) -> None:
        store = f"{address}/{quorum}"
        self.group.configure(store, "replica", members.index(self.rank), len(members), quorum)
        # A new one gets the model in its first step, and has no part in it.
        self.manager.participates = self.rank not in new
        self.participating = [member for member in members if member not in new]
        self.manager.participants = len(self.participating)

    def step(self, i: int, commit: bool = True) -> Tensors:
        self.manager.commits = commit
        outputs = self.averages.average(gradients(SHAPES, self.rank, i))
        if commit:
            add_to(self.sent, {n: len(self.participating) * out for n, out in outputs.items()})
            for member in self.participating:
                add_to(self.wanted, gradients(SHAPES, member, i))
        return outputs

    def residuals(self) -> Tensors:
        found = own_residuals_of(self.compression)
        return {name: residual.view(SHAPES[name]) for name, residual in found.items()}


def _sum(tensors: Tensors) -> Tensors:
    for tensor in tensors.values():
        dist.all_reduce(tensor)
    return tensors


def _shared_store(rank: int) -> tuple[dist.Store | None, str]:
    """Rank 0's store, and its address."""
    store = None
    address = [""]
    if rank == 0:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        address[0] = f"localhost:{store.port}"
    dist.broadcast_object_list(address)
    return store, address[0]


@pytest.mark.parametrize(
    ("kind", "wire"), [("ddp", None), ("ddp", "int8"), ("fsdp", "int8"), ("diloco", "int8")]
)
@on_ranks(3, backend="gloo")
def test_nothing_is_lost_as_replicas_leave_and_join(rank: int, kind: str, wire: str | None) -> None:
    _store, address = _shared_store(rank)
    replica = _Replica(rank, kind, wire)
    replica.join(address, 1, [0, 1, 2], new=[])
    for i in range(4):
        replica.step(i)
    before = replica.residuals()
    replica.step(4, commit=False)  # nobody applies it
    replica.join(address, 2, [0, 1, 2], new=[])
    assert all(torch.equal(r, before[name]) for name, r in replica.residuals().items())
    for i in range(5, 8):
        replica.step(i)
    left = _sum({name: r * (rank == 1) for name, r in replica.residuals().items()})
    if rank == 1:  # it begins anew
        steps, sent, wanted = replica.manager.step, replica.sent, replica.wanted
        replica = _Replica(rank, kind, wire)
    else:
        replica.join(address, 3, [0, 2], new=[])
        for i in range(8, 11):
            replica.step(i)
    replica.join(address, 4, [0, 1, 2], new=[1])
    if rank == 1:
        replica.manager.step, replica.sent, replica.wanted = steps, sent, wanted
    outputs = replica.step(11)
    shared = _sum({name: output.clone() for name, output in outputs.items()})
    assert all(torch.allclose(shared[name], 3 * output) for name, output in outputs.items())
    replica.join(address, 5, [0, 1, 2], new=[])
    for i in range(12, 15):
        replica.step(i)
    residuals = _sum(replica.residuals())
    assert residuals.keys() == {*COMPRESSED}
    assert all(residual.norm() > 0.1 for residual in residuals.values())
    if rank != 1:  # which has not seen all steps
        for name, total in replica.wanted.items():
            found = replica.sent[name] + residuals.get(name, 0) + left.get(name, 0)
            assert relative_error(found, total) < 3 * TOLERANCE[torch.float32], name


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@on_ranks(2, backend="gloo")
def test_nothing_is_lost_in_steps_of_two_passes(rank: int, kind: str) -> None:
    _store, address = _shared_store(rank)
    replica = _Replica(rank, kind, "int8")
    replica.join(address, 1, [0, 1], new=[])
    for i in range(6):
        first = 100 + i
        replica.averages.module(gradients(SHAPES, rank, first)).backward()
        before = replica.residuals()
        replica.step(i, commit=i != 3)
        if i != 3:
            for member in (0, 1):
                add_to(replica.wanted, gradients(SHAPES, member, first))
        if i == 2:
            kept = replica.residuals()
        elif i == 3:
            assert not all(torch.equal(r, before[name]) for name, r in kept.items())
            assert all(torch.equal(r, kept[name]) for name, r in replica.residuals().items())
    residuals = _sum(replica.residuals())
    for name, total in replica.wanted.items():
        found = replica.sent[name] + residuals.get(name, 0)
        assert relative_error(found, total) < 3 * TOLERANCE[torch.float32], name


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "diloco"])
@on_ranks(2, backend="gloo")
def test_a_replica_loads_what_it_saved(rank: int, kind: str) -> None:
    _store, address = _shared_store(rank)
    replica = _Replica(rank, kind, "int8")
    replica.join(address, 1, [0, 1], new=[])
    for i in range(4):
        replica.step(i)
    replica.step(4, commit=False)  # which is no part of the state
    state, before = replica.compression.state_dict(per_rank=True), replica.residuals()
    again = _Replica(rank, kind, "int8")
    again.compression.load_state_dict(state)
    again.join(address, 2, [0, 1], new=[])
    assert all(torch.equal(r, before[name]) for name, r in again.residuals().items())
    for one in (replica, again):
        one.group.shutdown()


@on_ranks(2, backend="gloo")
def test_a_mesh_with_replicas_of_its_own_is_refused(rank: int) -> None:
    module: Any = torch.nn.Linear(4, 4)
    mesh = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("replicate", "shard"))
    fully_shard(module, mesh=mesh)
    group = ProcessGroupPowerSGD(LIMIT)
    with pytest.raises(ValueError, match="mesh of this module has a dimension of replicas"):
        group.attach(module, _Manager(group))


def test_what_cannot_be_attached_is_said() -> None:
    with pytest.raises(ValueError, match="options of ProcessGroupPowerSGD: .*matrix_approx"):
        ProcessGroupPowerSGD(options={"matrix_approximation_rank": 0})
    group = ProcessGroupPowerSGD()
    other: Any = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="that fully_shard was called with, got Linear"):
        group.attach(other, other)
    manager: Any = _Manager(group)
    optimizer = torch.optim.SGD(other.parameters())
    packed = DiLoCo(manager, [other], optimizer, optimizer, 1, use_bucketization=True)
    with pytest.raises(ValueError, match="without use_bucketization and should_quantize"):
        group.attach_diloco(packed, manager)
    with pytest.raises(ValueError, match="takes torchft's DiLoCo, got Linear"):
        group.attach_diloco(other, manager)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    group.configure(f"localhost:{store.port}/x", "replica", 0, 1)
    whole = DiLoCo(manager, [other], optimizer, optimizer, 1)
    with pytest.raises(ValueError, match="before the manager's first quorum"):
        group.attach_diloco(whole, manager)
    group.shutdown()
