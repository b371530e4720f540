# SPDX-License-Identifier: BSD-3-Clause
"""The processes of one method, which take turns with other methods', and their measurements."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any

from launcher import hosts
from launcher.ranks import Ranks

from cluster.rank import GROUP_SECONDS, Job, train

ATTEMPTS = 3
Records = list[list[dict[str, Any]]]  # by step and rank


@dataclass
class Run:
    """The measurements of a turn. Lists are by step and hold means over the ranks."""

    failures: list[str] = field(default_factory=list)  # why each failed attempt failed
    milliseconds: list[float] = field(default_factory=list)  # without the turn's first step
    losses: list[float] = field(default_factory=list)  # since the processes started
    tx_bytes_per_step: float = 0  # of a host, however many ranks it has
    gradient_bytes: int = 0
    payload_bytes: int | None = None
    peak_memory_bytes: int | None = None  # the maximum over the ranks
    device: str | None = None

    @property
    def succeeded(self) -> bool:
        return bool(self.milliseconds)

    @property
    def median(self) -> float:
        return statistics.median(self.milliseconds)


class Failed(Exception):
    """Raised when a turn fails. The message says why."""


class Player:
    """A context manager for the processes of one method.

    They start with their first turn and sleep between turns. After a failure, which torch's own
    hook has now and then, they are started again.

    Args:
        where: the number of local processes, or the hosts that they are on.
        job: what the processes train.
        step_limit: seconds without a step on any rank after which a turn fails.
        warmup: unmeasured steps after a start.
        variables: additions to the processes' environment.
        logs: the folder for the output of failed processes; None: it is dropped.
    """

    def __init__(
        self,
        where: int | hosts.Hosts,
        job: Job,
        step_limit: float,
        warmup: int,
        variables: Mapping[str, str] | None = None,
        logs: Path | None = None,
    ) -> None:
        self._where, self._job, self._logs = where, job, logs
        self._step_limit, self._warmup = step_limit, warmup
        self._variables = variables
        self._attempts_left = ATTEMPTS
        self._ranks: Ranks | None = None
        self._losses: list[float] = []
        self._stack = ExitStack()

    def __enter__(self) -> Player:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.__exit__(*exception)

    @property
    def exhausted(self) -> bool:
        return not self._attempts_left

    def turn(self, steps: int) -> Run:
        """Trains for one unmeasured step and then the measured ones. Repeats a failed turn.

        With local steps, each time is the mean from one average to the next.
        """
        result = Run()
        while self._attempts_left:
            try:
                if self._ranks is None:
                    self._losses = []
                    self._ranks = Ranks(train, self._where, self._job, variables=self._variables)
                    self._stack.enter_context(self._ranks)
                    self._train(self._ranks, self._warmup, GROUP_SECONDS)
                measured = self._job.contender.every + steps
                self._gather(result, *self._train(self._ranks, measured, self._step_limit))
                return result
            except Failed as failure:
                result.failures.append(str(failure))
                self._attempts_left -= 1
                self._end_after(failure)
        return result

    def _end_after(self, failure: Failed) -> None:
        """Kills the processes, so that the next turn starts new ones."""
        assert self._ranks
        name = f"{self._job.model}-{self._job.contender.method}-{self._ranks.folder.name}"
        self._ranks.keep_logs(self._logs, name)
        self._stack.__exit__(Failed, failure, None)
        self._ranks = None

    def _train(
        self, ranks: Ranks, steps: int, limit: float
    ) -> tuple[Records, list[dict[str, Any]]]:
        """Returns the records of the steps, and the totals that each rank has counted."""
        try:
            for pipe in ranks.pipes:
                pipe.send(steps)
            told = self._listen(ranks, steps + 1, limit)
        except (EOFError, ConnectionError):
            raise Failed(ranks.complaints()) from None
        by_step = [list(records) for records in zip(*(each[:-1] for each in told), strict=True)]
        self._losses += [statistics.mean(r["loss"] for r in records) for records in by_step]
        return by_step, [each[-1] for each in told]

    def _listen(self, ranks: Ranks, expected: int, limit: float) -> Records:
        """Waits for `expected` messages from every rank. The first may take `limit` seconds.

        Raises:
            Failed: if no rank makes progress for too long.
            EOFError, ConnectionError: if a process has ended.
        """
        told: Records = [[] for _ in ranks.pipes]
        deadline = time.monotonic() + limit
        while min(map(len, told)) < expected:
            waiting = [
                pipe for pipe, of in zip(ranks.pipes, told, strict=True) if len(of) < expected
            ]
            ready = connection.wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise Failed(f"no rank made progress after steps {list(map(len, told))}")
            for number, pipe in enumerate(ranks.pipes):
                if pipe in ready:
                    told[number].append(pipe.recv())
            deadline = time.monotonic() + self._step_limit
        return told

    def _gather(self, result: Run, by_step: Records, counted: list[dict[str, Any]]) -> None:
        milliseconds = [statistics.mean(r["ms"] for r in records) for records in by_step]
        every = self._job.contender.every
        ends = range(2 * every, len(milliseconds) + 1, every)
        result.milliseconds = [statistics.mean(milliseconds[end - every : end]) for end in ends]
        result.losses = list(self._losses)
        result.tx_bytes_per_step = statistics.mean(c["tx_bytes"] for c in counted) / len(by_step)
        result.gradient_bytes = counted[0]["gradient_bytes"]
        result.payload_bytes = counted[0]["payload_bytes"]
        result.device = counted[0]["device"]
        if result.device:
            result.peak_memory_bytes = max(c["peak_memory_bytes"] for c in counted)
