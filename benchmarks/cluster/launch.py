# SPDX-License-Identifier: BSD-3-Clause
"""The ranks of a method, a fresh process on each host, and what they measure in their turns."""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster import hosts
from cluster.rank import Job

ATTEMPTS = 3
START_SECONDS = 120  # until the first step: importing torch takes its time on a busy machine

_BENCHMARKS = Path(__file__).resolve().parents[1]
_EXIT_SECONDS = 20
# The error line of Python and of C++. Only stacks are printed after it.
_ERROR = re.compile(r"(Error|Exception): |what\(\):")
_GRACE_SECONDS = 5  # for the other ranks once one has failed


@dataclass
class Run:
    """The measurements of a turn. Lists are by step and hold means over the ranks."""

    failures: list[str] = field(default_factory=list)  # the cause of each failed attempt
    milliseconds: list[float] = field(default_factory=list)  # without the turn's first step
    losses: list[float] = field(default_factory=list)  # since the ranks were started
    tx_bytes_per_step: float = 0
    gradient_bytes: int = 0
    peak_memory_bytes: int | None = None  # the largest of any rank
    device: str | None = None

    @property
    def succeeded(self) -> bool:
        return bool(self.milliseconds)

    @property
    def median(self) -> float:
        return statistics.median(self.milliseconds)


def environment(rank: int, variables: Mapping[str, str]) -> dict[str, str]:
    return {
        **os.environ,
        **variables,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": hosts.INTERFACE,
        "NCCL_SOCKET_IFNAME": hosts.INTERFACE,
        "NCCL_IB_DISABLE": "1",
        "NCCL_HOSTID": str(rank),  # or NCCL refuses two ranks on a GPU
    }


def advised(
    cluster: hosts.Hosts,
    variables: Mapping[str, str],
    limit: float,
    contenders: Sequence[str],
    **job: Any,
) -> dict[str, float]:
    """Returns what synchronization adds to a step, as advise measures it on these hosts.

    It is in milliseconds, by name, for plain and for these contenders. There is nothing if advise
    fails.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"{hosts.owner()}-"))
    processes = []
    try:
        for rank in range(len(cluster)):
            fields: dict[str, Any] = {
                "rank": rank,
                "world": len(cluster),
                "store": str(folder / "store"),
            }
            method = " ".join(contenders)
            this = Job(**fields, timeout=START_SECONDS, method=method, approximation=0, **job)
            command = this.command(folder / f"results{rank}", "cluster.advised")
            env = environment(rank, variables)
            processes.append(cluster.start(rank, command, env, cwd=_BENCHMARKS))
        deadline = time.monotonic() + START_SECONDS + limit
        while any(process.poll() is None for process in processes):
            # The others would wait for one that has failed.
            if any(process.poll() for process in processes) or time.monotonic() > deadline:
                return {}
            time.sleep(0.1)
        return dict(json.loads((folder / "results0").read_text()))
    except FileNotFoundError:
        return {}
    finally:
        cluster.kill(processes)
        shutil.rmtree(folder, ignore_errors=True)


class Failed(Exception):
    """An error whose text says why ranks did not get through a turn."""


class Ranks:
    """The ranks of one method.

    They start with their first turn and sleep between turns. After a failure, which torch's own
    hook has now and then, they start again.

    Args:
        cluster: as many hosts as there are ranks.
        variables: added to the ranks' environment.
        step_limit: seconds without a step on any rank after which a turn has failed.
        warmup: steps after a start that are not measured.
        logs: the folder that keeps what ranks have printed before a failure; None: none does.
        job: the fields of a Job that are the same on all ranks.
    """

    def __init__(
        self,
        cluster: hosts.Hosts,
        variables: Mapping[str, str],
        step_limit: float,
        warmup: int,
        logs: Path | None = None,
        **job: Any,
    ) -> None:
        self._cluster = cluster
        self._variables = variables
        self._step_limit = step_limit
        self._warmup = warmup
        self._logs = logs
        self._job = job
        self._attempts_left = ATTEMPTS
        self._processes: list[subprocess.Popen[str]] = []
        self._folder = Path()
        self._lines: list[list[dict[str, Any]]] = []  # the lines of every rank since the start
        self._losses: list[float] = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        if kind is None:
            # A client of MPS that is killed can take the others with it.
            self._close_inputs()
            with suppress(subprocess.TimeoutExpired):
                for process in self._processes:
                    process.wait(_EXIT_SECONDS)
        self._end()

    @property
    def exhausted(self) -> bool:
        return not self._attempts_left

    def turn(self, steps: int) -> Run:
        """Trains for one step, and then the measured ones. A failed turn is repeated."""
        result = Run()
        while self._attempts_left:
            try:
                if not self._processes:
                    self._start()
                    self._train(self._warmup)
                self._gather(result, *self._train(1 + steps))
                return result
            except Failed as failure:
                result.failures.append(str(failure))
                self._attempts_left -= 1
                self._keep_logs()
                self._end()
        return result

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix=f"{hosts.owner()}-"))
        world = len(self._cluster)
        self._lines = [[] for _ in range(world)]
        self._losses = []
        for rank in range(world):
            store = str(self._folder / "store")
            job = Job(rank=rank, world=world, store=store, timeout=START_SECONDS, **self._job)
            with (self._folder / f"log{rank}").open("w") as log:
                process = self._cluster.start(
                    rank,
                    job.command(self._folder / f"results{rank}"),
                    environment(rank, self._variables),
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=_BENCHMARKS,
                    text=True,
                )
            self._processes.append(process)

    def _end(self) -> None:
        self._cluster.kill(self._processes)
        self._close_inputs()
        self._processes = []
        if self._folder.name:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _keep_logs(self) -> None:
        if self._logs is None:
            return
        attempt = f"{self._job['model']}-{self._job['method']}-{self._folder.name}"
        (self._logs / attempt).mkdir(parents=True)
        for log in self._folder.glob("log*"):
            shutil.copy(log, self._logs / attempt)

    def _close_inputs(self) -> None:
        """Lets the ranks end by themselves."""
        for process in self._processes:
            with suppress(BrokenPipeError):
                if process.stdin:
                    process.stdin.close()

    def _train(self, steps: int) -> tuple[list[list[dict[str, Any]]], list[dict[str, Any]]]:
        """Returns the records of the steps and the last line, of each rank."""
        limit = self._step_limit if self._lines[0] else START_SECONDS
        with suppress(BrokenPipeError):  # whoever has ended is seen to have
            for process in self._processes:
                assert process.stdin
                process.stdin.write(f"{steps}\n")
                process.stdin.flush()
        expected = len(self._lines[0]) + steps + 1
        self._wait(expected, limit)
        new = [lines[expected - steps - 1 :] for lines in self._lines]
        of_steps = [records[:-1] for records in new]
        by_step = zip(*of_steps, strict=True)
        self._losses += [statistics.mean(r["loss"] for r in records) for records in by_step]
        return of_steps, [records[-1] for records in new]

    def _wait(self, expected: int, limit: float) -> None:
        """Waits until every rank has written so many lines.

        Raises:
            Failed: if a rank ends, or none gets any further for too long.
        """
        deadline = time.monotonic() + limit
        while True:
            before = [len(lines) for lines in self._lines]
            self._read()
            now = [len(lines) for lines in self._lines]
            if min(now) >= expected:
                return
            if any(process.poll() is not None for process in self._processes):
                time.sleep(_GRACE_SECONDS)  # the last lines of all ranks show the cause
                raise Failed(self._complaints())
            if now != before:
                deadline = time.monotonic() + self._step_limit
            if time.monotonic() > deadline:
                raise Failed(f"no rank got any further after steps {now}")
            time.sleep(0.02)

    def _read(self) -> None:
        for rank, lines in enumerate(self._lines):
            file = self._folder / f"results{rank}"
            if file.exists():
                complete = file.read_text().rpartition("\n")[0].splitlines()
                lines += [json.loads(line) for line in complete[len(lines) :]]

    def _complaints(self) -> str:
        """The last words of each failed rank, without repetition."""
        said = {}
        for rank, process in enumerate(self._processes):
            if process.poll() is not None:
                log = (self._folder / f"log{rank}").read_text(errors="replace")
                lines = [line.strip() for line in log.splitlines() if line.strip()]
                lines = [line for line in lines if _ERROR.search(line)] or lines
                code = process.returncode
                said[lines[-1] if lines else f"a rank ended with {code}, silently"] = rank
        return "; ".join(said)

    def _gather(
        self, result: Run, steps: list[list[dict[str, Any]]], counted: list[dict[str, Any]]
    ) -> None:
        by_step = list(zip(*steps, strict=True))
        milliseconds = [statistics.mean(r["ms"] for r in records) for records in by_step]
        result.milliseconds = milliseconds[1:]
        result.losses = list(self._losses)
        result.tx_bytes_per_step = statistics.mean(c["tx_bytes"] for c in counted) / len(by_step)
        result.gradient_bytes = counted[0]["gradient_bytes"]
        result.device = counted[0]["device"]
        if result.device:
            result.peak_memory_bytes = max(c["peak_memory_bytes"] for c in counted)
