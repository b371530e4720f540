# SPDX-License-Identifier: BSD-3-Clause
"""Replicas of a torchft job, each a process, with torchft's own lighthouse. They die on demand."""

from __future__ import annotations

import multiprocessing.connection
import os
import signal
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchft import Manager, Optimizer
from torchft.coordination import LighthouseServer

from support import ranks
from support.synthetic import own_residuals_of
from torch_powersgd.integrations.torchft import DistributedDataParallel, ProcessGroupPowerSGD

LIMIT = timedelta(seconds=15)
# The places at which a replica can die, in the order of a step. Healing is that of a new replica.
PLACES = ("forward", "exchange", "vote", "committed")
HEALING = "healing"


@dataclass(frozen=True)
class Death:
    """Where a replica kills itself, in the first of its passes from this step on."""

    step: int
    place: str


@dataclass
class Report:
    """One committed step of a replica."""

    name: str
    step: int
    participants: int
    weights: int  # a checksum
    loss: float


def train(pipe: Any, name: str, lighthouse: str, death: Death | None) -> None:
    """Trains, and sends a report of each committed step, until it is told the last one."""
    torch.set_num_threads(1)
    job = _Job(name, lighthouse, death)
    try:
        last = None
        while last is None or job.manager.current_step() < last:
            last = pipe.recv() if pipe.poll() else last
            if report := job.step():
                pipe.send(report)
        pipe.send(job.summary())
    except Exception as error:  # the parent raises it
        pipe.send(error)
        raise
    finally:
        job.manager.shutdown(wait=False)
    pipe.close()
    os._exit(0)  # torchft's threads wait for others


class _Job:
    def __init__(self, name: str, lighthouse: str, death: Death | None) -> None:
        self.name, self.death = name, death
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 24))
        inner = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.5)
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.group = _Group(self, LIMIT, {"start_powerSGD_iter": 2, "matrix_approximation_rank": 2})
        self.manager = Manager(
            pg=self.group,
            load_state_dict=self._load,
            state_dict=lambda: {"model": self.model.state_dict(), "inner": inner.state_dict()},
            min_replica_size=1,
            timeout=LIMIT,
            rank=0,
            world_size=1,
            store_addr="localhost",
            store_port=store.port,
            lighthouse_addr=lighthouse,
            replica_id=name,
        )
        self.store, self.inner = store, inner
        # Two buckets, so that a replica can die between them.
        self.ddp = DistributedDataParallel(self.manager, self.model, bucket_cap_mb=0.001)
        self.compression = self.group.attach(self.ddp, self.manager)
        self.optimizer = Optimizer(self.manager, inner)
        self.generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        self.last_bucket = len(self.ddp.reducer._get_zeros_like_grad_buckets()) - 1
        self.before: dict[str, torch.Tensor] = {}  # the residuals before the pass
        self.dropped = 0

    def step(self) -> Report | None:
        """Takes a step, and reports it if it was committed."""
        inputs = torch.randn(16, 24, generator=self.generator)
        self.optimizer.zero_grad()
        self.die_at("forward")
        loss = (self.ddp(inputs) - inputs.roll(1, 1)).square().mean()
        loss.backward()
        self.die_at("vote")
        step = self.manager.current_step()
        self.optimizer.step()
        self.die_at("committed")
        if self.manager.current_step() == step:
            self.dropped += 1
            return None
        weights = 0
        for parameter in self.model.parameters():
            weights = zlib.crc32(parameter.detach().numpy().tobytes(), weights)
        return Report(
            self.name,
            self.manager.current_step(),
            self.manager.num_participants(),
            weights,
            loss.item(),
        )

    def die_at(self, place: str) -> None:
        death = self.death
        if death and place == death.place and self.manager.current_step() >= death.step:
            os.kill(os.getpid(), signal.SIGKILL)

    def residuals(self) -> dict[str, torch.Tensor]:
        if self.compression.group.size() == 1 and not self.compression.stats()["compressed_calls"]:
            return {}
        return own_residuals_of(self.compression)

    def summary(self) -> dict[str, Any]:
        counts = self.compression.stats()
        return {
            "name": self.name,
            "dropped": self.dropped,
            "moves": self.group.moves,
            "changed": self.group.changed,
            "compressed_calls": counts["compressed_calls"],
            "residual": max(counts["residual_norms"].values(), default=0.0),
        }

    def _load(self, state: dict[str, Any]) -> None:
        self.die_at(HEALING)
        self.model.load_state_dict(state["model"])
        self.inner.load_state_dict(state["inner"])


class _Group(ProcessGroupPowerSGD):
    """Checks that another group leaves the residuals, and a step that was dropped nothing in them.

    That is so to the bit.
    """

    def __init__(self, job: _Job, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.job, self.moves = job, 0
        self.changed: set[str] = set()

    def configure(self, *arguments: Any, **named: Any) -> None:
        (attached,) = self._attached
        dropped = attached.step is not None and self.job.manager.current_step() <= attached.step
        expected = self.job.before if dropped else self.job.residuals()
        super().configure(*arguments, **named)
        self._check(expected)
        self.moves += bool(expected)

    def _leave(self) -> None:
        super()._leave()
        self._check(self.job.before)

    def _check(self, expected: dict[str, torch.Tensor]) -> None:
        # The manager would swallow an exception.
        found = self.job.residuals()
        self.changed |= {n for n, before in expected.items() if not torch.equal(found[n], before)}

    def allreduce(self, tensors: list[torch.Tensor], opts: object) -> dist.Work:
        (attached,) = self._attached
        if attached.bucket is None or attached.bucket == self.job.last_bucket:
            self.job.before = self.job.residuals()
        if attached.bucket == self.job.last_bucket - 1:
            self.job.die_at("exchange")  # with a bucket done, and one to come
        return super().allreduce(tensors, opts)


class Replicas:
    """A lighthouse, and the replicas that a test starts; use it in a with statement.

    It starts one, "a0", so that the job does not begin anew when others die.
    """

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.summaries: list[dict[str, Any]] = []
        self.deaths = 0
        self._running: dict[Any, Any] = {}

    def __enter__(self) -> Replicas:
        self._lighthouse = LighthouseServer(
            bind="[::]:0",
            min_replicas=1,
            join_timeout_ms=10_000,  # a replica that is slow is waited for, and one that died not
            heartbeat_timeout_ms=800,
            quorum_tick_ms=20,
        )
        self.start("a0")
        self.run(lambda: bool(self.reports))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._running.values():
            process.kill()
            process.join()
        self._lighthouse.shutdown()

    def start(self, name: str, death: Death | None = None) -> None:
        receiver, sender = ranks.context.Pipe()
        arguments = (sender, name, self._lighthouse.address(), death)
        process = ranks.context.Process(target=train, args=arguments)
        process.start()
        sender.close()
        self._running[receiver] = process

    def run(self, until: Callable[[], bool], seconds: float = 60) -> None:
        """Collects reports until this is so."""
        deadline = time.monotonic() + seconds
        while not until():
            left = deadline - time.monotonic()
            ready = multiprocessing.connection.wait(list(self._running), max(0, left))
            assert ready, f"no end after {len(self.reports)} reports"
            for pipe in ready:
                self._take(pipe)

    def run_until_deaths(self, count: int) -> None:
        self.run(lambda: self.deaths == count)

    def end(self, participants: int) -> None:
        """Ends the job ten steps after a next one at which so many replicas are there."""
        seen = len(self.reports)
        self.run(lambda: any(r.participants == participants for r in self.reports[seen:]))
        last = max(report.step for report in self.reports) + 10
        for pipe in self._running:
            pipe.send(last)
        self.run(lambda: not self._running)

    def _take(self, pipe: Any) -> None:
        try:
            told = pipe.recv()
        except EOFError:
            process = self._running.pop(pipe)
            process.join()
            self.deaths += process.exitcode == -signal.SIGKILL
            return
        if isinstance(told, Exception):
            raise told
        (self.reports if isinstance(told, Report) else self.summaries).append(told)

    def weights_by_step(self) -> dict[int, set[int]]:
        found: dict[int, set[int]] = {}
        for report in self.reports:
            found.setdefault(report.step, set()).add(report.weights)
        return found
