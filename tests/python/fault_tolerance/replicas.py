# SPDX-License-Identifier: BSD-3-Clause
"""Replicas of a torchft job, with torchft's own lighthouse."""

from __future__ import annotations

import multiprocessing.connection
import signal
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch.distributed as dist
from replica import Death, Kind, Place, Report, train
from torchft.coordination import LighthouseServer

from support import ranks


class Replicas:
    """A lighthouse, and the replicas that a test starts; use it in a with statement.

    It starts the first ones, of which "a0" never dies, so that the job does not begin anew.
    """

    def __init__(self, kind: Kind | None = None, first: Sequence[str] = ("a0",)) -> None:
        self.kind, self.first = kind or Kind(), first
        self.reports: list[Report] = []
        self.summaries: list[dict[str, Any]] = []
        self.deaths = 0
        self._running: dict[Any, tuple[Place, Any]] = {}
        self._first: dict[int, Any] = {}  # the first process of a replica, by the store's port
        self._stores: list[Any] = []

    def __enter__(self) -> Replicas:
        self._deadline = time.monotonic() + self.kind.limit
        self._lighthouse = LighthouseServer(
            bind="[::]:0",
            min_replicas=1,
            join_timeout_ms=10_000,  # a replica that is slow is waited for, and one that died not
            heartbeat_timeout_ms=800,
            quorum_tick_ms=20,
        )
        for name in self.first:
            self.start(name)
        self.run(lambda: bool(self.reports))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for _, process in self._running.values():
            process.kill()
            process.join()
        self._lighthouse.shutdown()

    def start(self, name: str, death: Death | None = None) -> None:
        """Starts a replica, of which the first process dies."""
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._stores.append(store)
        for rank in range(self.kind.processes):
            place = Place(name, rank, store.port)
            receiver, sender = ranks.context.Pipe()
            dies = death if rank == 0 else None
            arguments = (sender, place, self.kind, self._lighthouse.address(), dies)
            process = ranks.context.Process(target=train, args=arguments)
            process.start()
            sender.close()
            self._running[receiver] = place, process
            self._first.setdefault(store.port, process)

    def join(self, name: str) -> None:
        """Starts a replica, and waits until it has the model.

        Two without the model could make a quorum while another waits for a dead one, and begin the
        job anew.
        """
        seen = len(self.reports)
        self.start(name)
        self.run(lambda: any(report.place.name == name for report in self.reports[seen:]))

    def kill(self, name: str) -> None:
        for place, process in self._running.values():
            if place.name == name:
                process.kill()

    def run(self, until: Callable[[], bool]) -> None:
        """Collects reports until this is so."""
        while not until():
            left = self._deadline - time.monotonic()
            ready = multiprocessing.connection.wait(list(self._running), max(0, left))
            assert ready, f"no end after {len(self.reports)} reports"
            for pipe in ready:
                self._take(pipe)

    def run_until_deaths(self, count: int) -> None:
        self.run(lambda: self.deaths == count)

    def end(self, *names: str) -> None:
        """Ends the job ten steps after a next one that all of these replicas have committed."""
        seen = len(self.reports)

        def all_are_there() -> bool:
            committed: dict[int, set[str]] = {}
            for report in self.reports[seen:]:
                committed.setdefault(report.step, set()).add(report.place.name)
            return any(found >= {*names} for found in committed.values())

        self.run(all_are_there)
        last = max(report.step for report in self.reports) + 10
        for pipe in self._running:
            pipe.send(last)
        self.run(lambda: not self._running)
        assert {summary["place"].name for summary in self.summaries} == {*names}

    def _take(self, pipe: Any) -> None:
        try:
            told = pipe.recv()
        except EOFError:
            place, process = self._running.pop(pipe)
            process.join()
            if process.exitcode == -signal.SIGKILL and place.rank == 0:
                self.deaths += 1
                self._kill_all_of(place)
            return
        if isinstance(told, Exception):
            first = self._first[self._running[pipe][0].port]
            first.join(60)
            if first.exitcode != -signal.SIGKILL:  # else the others of the replica miss it
                raise told
            return
        (self.reports if isinstance(told, Report) else self.summaries).append(told)

    def _kill_all_of(self, dead: Place) -> None:
        """Kills the other processes of a replica, as torchrun would."""
        for place, process in self._running.values():
            if place.name == dead.name and place.port == dead.port:
                process.kill()

    def weights_by_step(self) -> dict[tuple[int, int], set[int]]:
        """The checksums of the replicas' weights, by step and rank in the replica."""
        found: dict[tuple[int, int], set[int]] = {}
        for report in self.reports:
            found.setdefault((report.step, report.place.rank), set()).add(report.weights)
        return found
