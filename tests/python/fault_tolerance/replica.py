# SPDX-License-Identifier: BSD-3-Clause
"""A replica of a torchft job, in processes of its own, which die on demand."""

from __future__ import annotations

import functools
import os
import signal
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchft import Manager, Optimizer
from torchft.local_sgd import DiLoCo

from support.cuda_ranks import become_host
from support.deadline import DEADLOCK
from support.ledger import own_residuals_of
from support.tensors import Tensors
from torch_powersgd import Compression, sparse
from torch_powersgd._core import _C
from torch_powersgd.integrations.torchft import DistributedDataParallel, ProcessGroupPowerSGD
from torch_powersgd.integrations.torchft.attached import Attached
from torch_powersgd.targets import shard_of

LIMIT = timedelta(seconds=60)
# The places at which a replica can die, in the order of a step. The other two are those of a new
# replica: it has agreed with the others but shared no factors, or it gets the model.
PLACES = ("forward", "exchange", "vote", "committed")
SHARING, HEALING = "sharing", "healing"


@dataclass(frozen=True)
class Death:
    """Where a replica kills itself, in the first of its steps from this one on."""

    step: int
    place: str


@dataclass(frozen=True)
class Kind:
    """What the replicas average, and who they are.

    Attributes:
        averages: "ddp", "fsdp" or "diloco".
        processes: Those of a replica.
        device: Of the model.
        limit: Seconds after which a test fails.
        manager: More arguments of torchft's manager.
        density: Share of the changes that "diloco" sends.
    """

    averages: str = "ddp"
    processes: int = 1
    device: str = "cpu"
    limit: float = DEADLOCK
    manager: Mapping[str, Any] = field(default_factory=dict)
    density: float | None = None


@dataclass(frozen=True)
class Place:
    """One process of a replica."""

    name: str
    rank: int  # in the replica
    port: int  # of the replica's store

    def __str__(self) -> str:
        return f"{self.name}.{self.rank}"


@dataclass
class Report:
    """One committed step of a process."""

    place: Place
    step: int
    weights: int  # a checksum


def train(pipe: Any, place: Place, kind: Kind, lighthouse: str, death: Death | None) -> None:
    """Trains, and sends a report of each committed step, until it is told the last one."""
    torch.set_num_threads(1)
    if kind.device == "cuda":
        become_host(f"{place}:{place.port}")
    try:
        job = _Job(place, kind, lighthouse, death)
        last = None
        while last is None or job.manager.current_step() < last:
            last = pipe.recv() if pipe.poll() else last
            if report := job.step():
                pipe.send(report)
        pipe.send(job.summary())
        dist.barrier()  # one of them has the replica's manager
    except Exception as error:  # the parent raises it
        pipe.send(error)
        raise
    pipe.close()
    os._exit(0)  # torchft's threads wait for others


class _Job:
    def __init__(self, place: Place, kind: Kind, lighthouse: str, death: Death | None) -> None:
        self.place, self.device, self.death = place, kind.device, death
        store = dist.TCPStore("localhost", place.port)
        own = dist.PrefixStore("torch", store)
        dist.init_process_group("gloo", store=own, rank=place.rank, world_size=kind.processes)
        torch.manual_seed(0)
        layers = nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 24)
        self.model: Any = nn.Sequential(*layers).to(self.device)
        self.forward = self.model
        if kind.averages == "fsdp":
            mesh = init_device_mesh("cpu", (kind.processes,))
            for layer in self.model:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        inner = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.5)
        self.group = _Group(self)
        self.manager = _Manager(
            pg=self.group,
            load_state_dict=self._load,
            state_dict=lambda: {"model": self.model.state_dict(), "inner": inner.state_dict()},
            timeout=LIMIT,
            rank=place.rank,
            world_size=kind.processes,
            store_addr="localhost",
            store_port=place.port,
            lighthouse_addr=lighthouse,
            replica_id=place.name,
            **{"min_replica_size": 1, **kind.manager},
        )
        self.manager.job = self
        self.store, self.inner = store, inner
        self.optimizer: Any = Optimizer(self.manager, inner)
        self.shared = list(self.model.parameters())
        if kind.averages == "ddp":  # two buckets, so that a replica can die between them
            self.forward = DistributedDataParallel(self.manager, self.model, bucket_cap_mb=0.001)
        if kind.averages == "diloco":
            self.optimizer, diloco = inner, self._diloco()
            fragments = diloco._fragments
            self.shared = [p for f in fragments for p in f.original_parameters.values()]
            if kind.density:
                sparse.BLOCK = sparse.PART  # or such small layers would be sent whole
            self.compressions = self.group.attach_diloco(diloco, self.manager, kind.density)
        else:
            self.compressions = [self.group.attach(self.forward, self.manager)]
        self.generator = torch.Generator().manual_seed(zlib.crc32(str(place).encode()))
        self.dropped = 0

    def _diloco(self) -> DiLoCo:
        parts = [self.model[0], self.model[2]]
        outer = [torch.optim.SGD(p.parameters(), lr=0.8, momentum=0.3) for p in parts]
        steps: Any = DiLoCo(self.manager, parts, self.inner, outer, 4, fragment_sync_delay=1)
        return steps.__enter__()

    def step(self) -> Report | None:
        """Takes a step, and reports it if it was committed."""
        inputs = torch.randn(16, 24, generator=self.generator).to(self.device)
        step, failed = self.manager.current_step(), self.manager.failed
        self.optimizer.zero_grad()
        self.die_at("forward")
        loss = (self.forward(inputs) - inputs.roll(1, 1)).square().mean()
        loss.backward()
        self.optimizer.step()
        if self.manager.failed > failed:
            self.dropped += 1
            self.group.check_dropped()
            return None
        if self.manager.current_step() == step:
            return None
        weights = 0
        for parameter in self.shared:
            weights = zlib.crc32(shard_of(parameter.detach()).cpu().numpy().tobytes(), weights)
        return Report(self.place, self.manager.current_step(), weights)

    def die_at(self, place: str) -> None:
        death = self.death
        if death and place == death.place and self.manager.current_step() >= death.step:
            os.kill(os.getpid(), signal.SIGKILL)

    def summary(self) -> dict[str, Any]:
        counts = [compression.stats() for compression in self.compressions]
        return {
            "place": self.place,
            "dropped": self.dropped,
            "moves": self.group.moves,
            "changed": self.group.changed,
            "compressed_calls": min(count["compressed_calls"] for count in counts),
            "residual": min(max(count["residual_norms"].values()) for count in counts),
        }

    def _load(self, state: dict[str, Any]) -> None:
        self.die_at(HEALING)
        self.model.load_state_dict(state["model"])
        self.inner.load_state_dict(state["inner"])


class _Manager(Manager):
    """Dies before or after the vote."""

    job: _Job
    failed = 0

    def should_commit(self, *arguments: Any) -> bool:
        self.job.die_at("vote")
        commits = super().should_commit(*arguments)
        self.job.die_at("committed")
        if not commits:
            self.job.group.note_dropped()
        self.failed += not commits
        return commits


class _Group(ProcessGroupPowerSGD):
    """Checks that another group leaves the residuals, and a step that was dropped nothing in them.

    That is so to the bit.
    """

    def __init__(self, job: _Job) -> None:
        super().__init__(
            LIMIT, {"start_powerSGD_iter": 2, "matrix_approximation_rank": 2, "check_every": 1}
        )
        self.job, self.moves, self.calls = job, 0, 0
        self.changed: set[str] = set()
        self.before: dict[Attached, Tensors] = {}  # the residuals before the last step

    def _attach(self, *arguments: Any) -> Compression:
        compression = super()._attach(*arguments)
        attached: Any = self._attached[-1]
        attached.begin_pass = functools.partial(self._begin_pass, attached)
        return compression

    def _begin_pass(self, attached: Attached) -> None:
        Attached.begin_pass(attached)
        self.before[attached], self.calls = _residuals(attached), 0

    def _create_pg(self, *arguments: Any) -> dist.ProcessGroup:
        if self.job.death and self.job.death.place == SHARING:
            core: Any = _C
            core.BucketReducer = functools.partial(self._dies_in_move, _C.BucketReducer)
        expected = [self._expected(attached) for attached in self._attached]
        group = super()._create_pg(*arguments)
        self._check(expected)
        self.moves += any(expected)
        return group

    def _dies_in_move(self, make: Any, *arguments: Any) -> None:
        make(*arguments).states.layers()  # returns once it has connected to the others
        self.job.die_at(SHARING)

    def note_dropped(self) -> None:
        """Called between the decision to drop a step and its end."""
        self.expected = [self._expected(attached) for attached in self._attached]

    def check_dropped(self) -> None:
        self._check(self.expected)

    def _expected(self, attached: Attached) -> Tensors:
        dropped = attached.step is not None and self.job.manager.current_step() <= attached.step
        return self.before[attached] if dropped else _residuals(attached)

    def _check(self, expected: list[Tensors]) -> None:
        # The manager would swallow an exception.
        for attached, before in zip(self._attached, expected, strict=True):
            found = _residuals(attached)
            self.changed |= {name for name in before if not torch.equal(found[name], before[name])}

    def allreduce(self, tensors: list[torch.Tensor], opts: object) -> dist.Work:
        self.calls += 1
        if self.calls == 2:
            self.job.die_at("exchange")  # with a tensor given, and another to come
        return super().allreduce(tensors, opts)


def _residuals(attached: Attached) -> Tensors:
    compression = attached.compression
    if compression.group.size() == 1 and not compression.stats()["compressed_calls"]:
        return {}
    return own_residuals_of(compression)
