# SPDX-License-Identifier: BSD-3-Clause
"""One trial: starts the ranks, lets the fault happen, and judges how each rank ends."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from cluster import hosts

from faults.cases import DROPPED_RATE, RATE, SLOW_RATE, TIMEOUT, Case
from faults.rank import FAULT_STEP, LOCAL, Job

METHODS = ("plain", "ours")
GRACE = 15.0  # seconds that an error may take beyond the time-out
LIMIT = 240.0  # seconds after which ranks hang that should have finished
_BENCHMARKS = Path(__file__).resolve().parents[1]
# Words of errors that name what happened: a peer has gone, or did not answer in time.
_CAUSES = re.compile(
    r"connection (was likely )?(closed|reset|refused|aborted)|broken pipe|timed? ?out|timeout"
    r"|within \d+ seconds|rank \d+ has|remote (process|peer)|not reachable",
    re.IGNORECASE,
)

Process = subprocess.Popen[Any]
Reference = Sequence[str]  # the digest after each step of an undisturbed run


@dataclasses.dataclass
class End:
    """The end of one rank."""

    rank: int
    exitcode: int | None  # None: it was ended, as it hung
    seconds: float | None  # from the fault to the error, or to the end if there is none
    seconds_to_end: float | None  # from the fault to the end of the process
    steps: int = 0
    error: str = ""
    right: bool = True  # the parameters after every step were right
    retransmitted: int = 0


class Trial:
    """A case with one method. `run` is a generator, so that several trials take turns.

    Args:
        case: the fault.
        method: "plain" or "ours".
        reference: digests of an undisturbed run. Without them all that ranks end with is right.
        logs: the folder for the output of ranks that hang or end wrongly.
        timeout: the seconds of the group's time-out.
    """

    def __init__(
        self,
        case: Case,
        method: str,
        reference: Reference = (),
        logs: Path | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        self.case, self.method, self.timeout = case, method, timeout
        self.ends: list[End] = []
        self.orphans: list[int] = []
        self.digests: list[str] = []
        self._reference = reference
        self._logs = logs
        self._fault = 0.0  # the time of the fault
        self._began = self._seconds = 0.0
        self._processes: list[Process] = []
        self._ended: dict[int, float] = {}  # the time at which each rank's process had ended

    def run(self) -> Generator[None]:
        self._began = time.monotonic()
        with (
            tempfile.TemporaryDirectory(prefix=f"{hosts.owner()}-") as folder,
            self._network() as network,
        ):
            self._folder = Path(folder)
            try:
                for rank in range(self.case.world):
                    self._processes.append(self._start(network, rank))
                yield from self._disturb(network)
                yield from self._until(lambda: len(self._ended) == self.case.world)
                yield from self._judge()
            finally:
                for process in self._processes:
                    process.kill()
                    process.wait()
                if self._logs and self.outcome not in ("right", "error"):
                    self._keep_logs(self._logs)

    def _judge(self) -> Generator[None]:
        ended = [process for process in self._processes if process.poll() is not None]
        for process in self._processes:
            if process not in ended:
                process.send_signal(signal.SIGUSR1)  # it prints its stacks
                yield from self._pause(1)
        self.ends = [self._end_of(rank) for rank in range(self.case.world)]
        self.orphans = _sessions(process.pid for process in ended)
        self._seconds = time.monotonic() - self._began

    @property
    def outcome(self) -> str:
        """right: all went on to the end. error: every living rank names a cause in time.

        hung, wrong, unnamed, late, crash or mixed: the fault was not endured as it should be. After
        an error that names its cause, a rank that crashes ends by a signal.
        """
        living = [end for end in self.ends if not self._is_killed(end)]
        if not all(end.right for end in living):
            return "wrong"
        if self.orphans or any(end.exitcode is None for end in living):
            return "hung"
        failed = [end for end in living if end.exitcode]
        if not failed:
            return "right"
        if len(failed) < len(living):
            return "mixed"
        if not all(_CAUSES.search(end.error) for end in failed):
            return "unnamed"
        if any(end.exitcode < 0 for end in failed if end.exitcode):
            return "crash"
        last = max(self._since(end, end.seconds) for end in failed)
        return "error" if last <= self.timeout + GRACE else "late"

    def record(self) -> dict[str, Any]:
        living = [end for end in self.ends if not self._is_killed(end)]
        times = [self._since(end, end.seconds) for end in living if end.exitcode]
        return {
            "fault": self.case.name,
            "method": self.method,
            "ranks": self.case.world,
            "outcome": self.outcome,
            "seconds_to_error": [round(seconds, 1) for seconds in times],
            "errors": sorted({end.error for end in living if end.error}),
            "retransmitted": sum(end.retransmitted for end in living),
            "ends": [dataclasses.asdict(end) for end in self.ends],
            "seconds": round(self._seconds, 1),
        }

    def _is_killed(self, end: End) -> bool:
        return self.case.kind == "kill" and end.rank == self.case.victim

    def _since(self, end: End, seconds: float | None) -> float:
        """The seconds from when a rank could notice the fault."""
        stopped = self.case.kind == "stop" and end.rank == self.case.victim
        return (seconds or 0) - (self.case.seconds if stopped else 0)

    def _network(self) -> AbstractContextManager[hosts.Hosts | None]:
        case = self.case
        if not self.case.needs_links:
            return nullcontext()
        return hosts.Hosts(case.world, RATE, case.delay_ms, link=case.link)

    def _start(self, network: hosts.Hosts | None, rank: int) -> Process:
        case = self.case
        job = Job(
            self.method,
            rank,
            case.world,
            case.steps,
            "10.77.0.1" if network else LOCAL,
            str(self._folder),
            self.timeout,
            case.stage,
            case.victim,
            case.one_bucket,
            case.slowed,
        )
        variables = {
            **os.environ,
            hosts.MARK: hosts.owner(),
            "GLOO_SOCKET_IFNAME": hosts.INTERFACE if network else "lo",
            "OMP_NUM_THREADS": "1",
        }
        with open(self._folder / f"log{rank}", "w") as log:
            popen: dict[str, Any] = {"cwd": _BENCHMARKS, "stdout": log, "stderr": log}
            if network:
                return network.start(rank, job.command(), variables, **popen)
            return subprocess.Popen(job.command(), env=variables, start_new_session=True, **popen)

    def _disturb(self, network: hosts.Hosts | None) -> Generator[None]:
        """Lets the fault happen, once the victim has come to its step."""
        case, victim = self.case, self.case.victim
        self._fault = time.monotonic()
        if case.kind in ("link", "none"):
            return
        if case.kind == "kill":
            if case.slowed:
                yield from self._until(
                    lambda: min(map(self._steps, range(case.world))) >= FAULT_STEP
                )
                assert network
                for host in range(case.world):
                    network.set_rate(host, SLOW_RATE)
                (self._folder / "go").touch()
            yield from self._until(lambda: victim in self._ended)
            self._fault = self._time("fault") or self._fault
            return
        assert network
        yield from self._until(lambda: self._steps(victim) >= FAULT_STEP)
        begin, end = self._switches(network)
        begin()
        self._fault = time.monotonic()
        yield from self._pause(case.seconds)
        end()

    def _switches(self, network: hosts.Hosts) -> tuple[Callable[[], None], Callable[[], None]]:
        """The beginning and the end of a fault that lasts."""
        victim = self.case.victim
        process = self._processes[victim]
        if self.case.kind == "cut":
            return partial(network.cut, victim), partial(network.mend, victim)
        if self.case.kind == "stop":
            send = process.send_signal
            return partial(send, signal.SIGSTOP), partial(send, signal.SIGCONT)
        set_rate = network.set_rate
        return partial(set_rate, victim, DROPPED_RATE), partial(set_rate, victim, RATE)

    def _steps(self, rank: int) -> int:
        """The number of steps that a rank has ended."""
        file = self._folder / f"progress{rank}"
        return file.stat().st_size if file.exists() else 0

    def _time(self, name: str) -> float | None:
        file = self._folder / name
        return float(file.read_text()) if file.exists() else None

    def _until(self, condition: Callable[[], bool]) -> Generator[None]:
        """Waits for the condition, or until the trial takes too long."""
        while not condition() and time.monotonic() < self._began + LIMIT:
            self._note_ends()
            yield

    def _pause(self, seconds: float) -> Generator[None]:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._note_ends()
            yield

    def _note_ends(self) -> None:
        for rank, process in enumerate(self._processes):
            if rank not in self._ended and process.poll() is not None:
                self._ended[rank] = time.monotonic()

    def _end_of(self, rank: int) -> End:
        process = self._processes[rank]
        file = self._folder / f"report{rank}"
        report = json.loads(file.read_text()) if file.exists() else {"digests": []}
        digests = report.pop("digests")
        if rank == 0:
            self.digests = digests
        complete = len(digests) == self.case.steps or process.returncode != 0
        right = complete and (not self._reference or digests == self._reference[: len(digests)])
        ended = self._ended.get(rank)
        failed = self._time(f"error{rank}") or ended
        seconds, to_end = (
            None if moment is None else round(moment - self._fault, 1) for moment in (failed, ended)
        )
        return End(rank, process.returncode, seconds, to_end, len(digests), right=right, **report)

    def _keep_logs(self, logs: Path) -> None:
        name = re.sub(r"\W+", "-", f"{self.case.name}-{self.method}")
        logs.mkdir(parents=True, exist_ok=True)
        for file in self._folder.glob("log*"):
            (logs / f"{name}-{file.name}").write_text(file.read_text())


def _sessions(leaders: Iterator[int]) -> list[int]:
    """The processes that live in the session of a process that has ended."""
    wanted, found = set(leaders), []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) in wanted and fields[0] not in "ZX":
            found.append(int(stat.parent.name))
    return found
