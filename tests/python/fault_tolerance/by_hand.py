# SPDX-License-Identifier: BSD-3-Clause
"""Replicas of torchft by hand, with a manager that does what a test says."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torchft.process_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torchft.local_sgd import DiLoCo

from support.deadline import OPERATION
from support.ledger import own_residuals_of
from support.synthetic import SHAPES, Synthetic, gradients
from support.tensors import Tensors, add_to
from torch_powersgd.integrations.torchft import DistributedDataParallel, ProcessGroupPowerSGD
from torch_powersgd.targets import shard_of

LIMIT = timedelta(seconds=OPERATION)


class Manager:
    """Averages over the replicas of the process group, and counts what it is told to commit."""

    _use_async_quorum = False

    def __init__(self, group: ProcessGroupPowerSGD) -> None:
        self.group, self.step, self.participates = group, 0, True
        self.participants = 1
        self.commits = True
        self.error: Exception | None = None
        self.before_commit: Callable[[], None] = lambda: None

    def current_step(self) -> int:
        return self.step

    def allreduce(self, tensor: torch.Tensor, should_quantize: bool = False) -> Any:
        if not self.participates:
            tensor.zero_()
        if self.error is not None:
            return _Mean(None, tensor, self.participants)
        try:
            work = self.group.allreduce([tensor], dist.ReduceOp.SUM)
        except Exception as error:  # which torchft's manager keeps as well
            self.error, work = error, None
        return _Mean(work, tensor, self.participants)

    def num_participants(self) -> int:
        return self.participants

    def is_participating(self) -> bool:
        return self.participates

    def should_commit(self) -> bool:
        self.before_commit()
        commits = self.commits and self.error is None
        self.step += commits
        return commits

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None  # what else a DiLoCo calls


class _Mean:
    def __init__(self, work: Any, tensor: torch.Tensor, participants: int) -> None:
        self.work, self.tensor, self.participants = work, tensor, participants

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        self.tensor /= self.participants


class _Gradients:
    """Gradients that the backward pass of a module averages."""

    def __init__(self, module: Any, manager: Manager) -> None:
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
        self.begun = False

    def average(self, coefficients: Tensors) -> Tensors:
        if not self.begun:
            self.diloco.__enter__()
            self.begun = True
        self.model.zero_grad()
        self.model(coefficients).backward()
        self.inner.step()
        return self.outputs

    def _note(self, *_: Any) -> None:
        self.outputs = {name: weight.grad for name, weight in self.model.weights.items()}


def configure(group: ProcessGroupPowerSGD, store: str, rank: int, size: int) -> None:
    """Makes the group of a quorum, as torchft's manager does."""
    if hasattr(group, "configure"):
        group.configure(store, "replica", rank, size)
    else:
        torchft.process_group.reconfigure_with_store(group, store, rank, size)


class Replica:
    def __init__(
        self, rank: int, kind: str, wire: str | None = None, density: float | None = None
    ) -> None:
        self.rank = rank
        options = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 1, "wire_dtype": wire}
        self.group = ProcessGroupPowerSGD(LIMIT, options)
        self.manager = Manager(self.group)
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
            diloco = self.averages.diloco
            (self.compression,) = self.group.attach_diloco(diloco, stand_in, density)
        self.sent: Tensors = {}
        self.wanted: Tensors = {}

    def join(self, address: str, quorum: object, members: list[int], new: list[int]) -> None:
        configure(self.group, f"{address}/{quorum}", members.index(self.rank), len(members))
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


def shared_store(rank: int) -> tuple[dist.Store | None, str]:
    """Rank 0's store, and its address."""
    store = None
    address = [""]
    if rank == 0:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        address[0] = f"localhost:{store.port}"
    dist.broadcast_object_list(address)
    return store, address[0]
