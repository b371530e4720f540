# SPDX-License-Identifier: BSD-3-Clause
"""``ProcessGroupPowerSGD`` by hand, with a manager that does what a test says.

The sum of outputs times participants + the residuals of all replicas = the sum of all gradients of
the steps that were committed.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("torchft")

from by_hand import LIMIT, Manager, Replica, configure, shared_store
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torchft.local_sgd import DiLoCo

from support.ledger import TOLERANCE
from support.log_records import LogRecords
from support.on_ranks import all_agree, on_ranks
from support.sparse import mean_of, sent_of
from support.synthetic import COMPRESSED, SHAPES, gradients
from support.tensors import Tensors, add_to, relative_error, same
from torch_powersgd import sparse
from torch_powersgd.integrations.torchft import ProcessGroupPowerSGD

DENSITY = 1 / 16


def _sum(tensors: Tensors) -> Tensors:
    for tensor in tensors.values():
        dist.all_reduce(tensor)
    return tensors


@pytest.mark.parametrize(
    ("kind", "wire"), [("ddp", None), ("ddp", "int8"), ("fsdp", "int8"), ("diloco", "int8")]
)
@on_ranks(3, backend="gloo")
def test_nothing_is_lost_as_replicas_leave_and_join(rank: int, kind: str, wire: str | None) -> None:
    _store, address = shared_store(rank)
    replica = Replica(rank, kind, wire)
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
        replica = Replica(rank, kind, wire)
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
    if kind == "diloco":
        _check_kept(replica, replica.residuals())
    residuals = _sum(replica.residuals())
    assert residuals.keys() == {*COMPRESSED}
    assert all(residual.norm() > 0.1 for residual in residuals.values())
    if rank != 1:  # which has not seen all steps
        for name, total in replica.wanted.items():
            found = replica.sent[name] + residuals.get(name, 0) + left.get(name, 0)
            assert relative_error(found, total) < 3 * TOLERANCE[torch.float32], name


@on_ranks(3, backend="gloo")
def test_replicas_that_send_their_largest_changes_leave_and_join(rank: int) -> None:
    sparse.BLOCK = sparse.PART  # so that even small tensors are sent sparse
    _store, address = shared_store(rank)
    replica = Replica(rank, "diloco", density=DENSITY)
    replica.join(address, 1, [0, 1, 2], new=[])
    replica.step(0)  # exact
    for i in range(1, 4):
        _check_sparse_round(replica, i, [0, 1, 2])
    saved = replica.compression.state_dict(per_rank=True)
    before = replica.residuals()
    replica.step(4, commit=False)  # nobody applies it
    replica.join(address, 2, [0, 1, 2], new=[])
    _check_sparse_round(replica, 5, [0, 1, 2], before)
    left = replica.residuals()
    if rank == 1:  # it begins anew, from what it has saved
        step = replica.manager.step
        replica = Replica(rank, "diloco", density=DENSITY)
        replica.compression.load_state_dict(saved)
        assert same(replica.residuals().values(), before.values())
        replica.manager.step = step
    else:
        replica.join(address, 3, [0, 2], new=[])
        assert same(replica.residuals().values(), left.values())
        replica.step(6)
        replica.join(address, f"alone/{rank}", [rank], new=[])
        alone = gradients(SHAPES, rank, 100)
        for name, output in replica.step(100).items():  # exact: there is nothing to send
            assert relative_error(output, alone[name]) < 1e-5, name
    replica.join(address, 4, [0, 1, 2], new=[1])
    outputs = replica.step(7)
    assert all_agree([output.tolist() for output in outputs.values()])
    replica.join(address, 5, [0, 1, 2], new=[])
    _check_sparse_round(replica, 8, [0, 1, 2])
    stats = replica.compression.stats(per_layer=True)
    assert stats["compressed_calls"] >= 2
    for name, residual in replica.residuals().items():
        layer = stats["layers"][f"weights.{name}"]
        assert layer["residual"] == pytest.approx(residual.norm().item(), rel=1e-5)
        assert layer["bytes_after"] < layer["bytes_before"] / 4
    assert "at a density of 16/256" in str(replica.compression)
    replica.compression.reset_stats()
    assert replica.compression.stats()["compressed_calls"] == 0


@on_ranks(2, backend="gloo")
def test_a_warning_once_where_the_largest_changes_cancel(rank: int) -> None:
    sparse.BLOCK = sparse.PART
    records = LogRecords(logging.WARNING)
    _store, address = shared_store(rank)
    replica = Replica(rank, "diloco", density=DENSITY)
    replica.join(address, 1, [0, 1], new=[])
    changes = gradients(SHAPES, 0, 0)
    for rounds, sign, warnings in ((11, 1, 0), (30, 1 - 2 * rank, 1)):  # the first is exact
        for _ in range(rounds):
            replica.averages.average({name: sign * each for name, each in changes.items()})
        assert len(records.matching("has mostly canceled")) == (warnings if rank == 0 else 0)


def _check_sparse_round(
    replica: Replica, i: int, members: list[int], held: Tensors | None = None
) -> None:
    """The means are those over the senders of what each had to send, which keeps the rest."""
    before = held or replica.residuals()
    everyone: list[Any] = [None] * len(members)
    dist.all_gather_object(everyone, before)
    outputs, after = replica.step(i), replica.residuals()
    for name, output in outputs.items():
        wanted = [gradients(SHAPES, member, i)[name].double() for member in members]
        if name in before:
            had = [g + of[name] for g, of in zip(wanted, everyone, strict=True)]
            sent = [sent_of(numbers, DENSITY) for numbers in had]
            rest = had[replica.rank] - sent[replica.rank]
            assert relative_error(after[name], rest) < TOLERANCE[torch.float32], name
            assert relative_error(output, mean_of(sent)) < TOLERANCE[torch.float32], name
        else:
            assert relative_error(output, torch.stack(wanted).mean(0)) < 1e-5, name
    _check_kept(replica, after)


def _check_kept(replica: Replica, own: Tensors) -> None:
    """DiLoCo's parameters are the original ones less a share of what this replica has not sent."""
    (fragment,) = replica.averages.diloco._fragments
    attached: Any = replica.group._attached[0]
    assert attached.kept
    for name, parameter in replica.averages.model.weights.items():
        original = fragment.original_parameters[f"weights.{name}"]
        kept = attached.kept * own.get(name, torch.zeros(()))
        assert relative_error(parameter, original.double() - kept) < TOLERANCE[torch.float32], name


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@on_ranks(2, backend="gloo")
def test_nothing_is_lost_in_steps_of_two_passes(rank: int, kind: str) -> None:
    _store, address = shared_store(rank)
    replica = Replica(rank, kind, "int8")
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
    _store, address = shared_store(rank)
    replica = Replica(rank, kind, "int8")
    replica.join(address, 1, [0, 1], new=[])
    for i in range(4):
        replica.step(i)
    replica.step(4, commit=False)  # which is no part of the state
    state, before = replica.compression.state_dict(per_rank=True), replica.residuals()
    again = Replica(rank, kind, "int8")
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
        group.attach(module, Manager(group))


def test_what_cannot_be_attached_is_said() -> None:
    with pytest.raises(ValueError, match="options of ProcessGroupPowerSGD: .*matrix_approx"):
        ProcessGroupPowerSGD(options={"matrix_approximation_rank": 0})
    group = ProcessGroupPowerSGD()
    other: Any = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="that FSDP2 has sharded, got Linear"):
        group.attach(other, other)
    manager: Any = Manager(group)
    optimizer = torch.optim.SGD(other.parameters())
    packed = DiLoCo(manager, [other], optimizer, optimizer, 1, use_bucketization=True)
    with pytest.raises(ValueError, match="without use_bucketization and should_quantize"):
        group.attach_diloco(packed, manager)
    with pytest.raises(ValueError, match="diloco must be torchft's DiLoCo, got Linear"):
        group.attach_diloco(other, manager)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    configure(group, f"localhost:{store.port}/x", 0, 1)
    whole = DiLoCo(manager, [other], optimizer, optimizer, 1)
    with pytest.raises(ValueError, match="before the manager's first quorum"):
        group.attach_diloco(whole, manager)
    group.shutdown()
