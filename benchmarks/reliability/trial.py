# SPDX-License-Identifier: BSD-3-Clause
"""One trial: starts the processes, causes the fault, and judges how each process ends."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from launcher.hosts import Hosts
from launcher.ranks import Ranks
from report import Record

from reliability.cases import DROPPED_RATE, FAULT_STEP, RATE, SLOW_RATE, TIMEOUT, Case
from reliability.training import train

GRACE = 15.0  # seconds that an error may take beyond the timeout
LIMIT = 240.0  # seconds after which processes count as hung
# Words of errors that name a cause: a peer is gone, or did not answer in time.
_CAUSES = re.compile(
    r"connection (was likely )?(closed|reset|refused|aborted)|broken pipe|timed? ?out|timeout"
    r"|within \d+ seconds|rank \d+ has|remote (process|peer)|not reachable",
    re.IGNORECASE,
)


@dataclass
class End:
    """What a process has reported, and how it ended."""

    exitcode: int | None = None  # None: it hung and was killed
    digests: list[str] = field(default_factory=list)  # of the parameters after each step
    error: str = ""
    retransmitted: int = 0  # TCP segments that its host has retransmitted
    error_time: float | None = None
    fault_time: float | None = None  # when it killed itself
    end_time: float | None = None


class Trial:
    """A case with one method.

    Args:
        case: the fault.
        method: "plain" or "ours".
        reference: digests of an undisturbed run. Without them, any parameters are right.
        timeout: the group's timeout in seconds.
        logs: the folder for the processes' output if the trial fails.
    """

    def __init__(
        self,
        case: Case,
        method: str,
        reference: Sequence[str] = (),
        timeout: float = TIMEOUT,
        logs: Path | None = None,
    ) -> None:
        self.case, self.method, self.reference = case, method, reference
        self.timeout, self.logs = timeout, logs
        self.ends = [End() for _ in range(case.world)]
        self.orphans: list[int] = []
        self._fault = 0.0  # the time of the fault

    def run(self) -> None:
        case, where = self.case, self._network()
        with where as place, Ranks(train, place, case, self.method, self.timeout) as ranks:
            self._ranks = ranks
            self._fault = time.monotonic()
            self._deadline = self._fault + LIMIT
            self._disturb(place)
            self._listen(lambda: all(end.exitcode is not None for end in self.ends))
            running = ranks.running
            self.orphans = _sessions({p.pid for p in ranks.processes if p not in running})
            for process in running:
                os.kill(process.pid, signal.SIGUSR1)  # makes it print its stack traces
                process.join(1)
                process.kill()
            if self.outcome not in ("right", "error"):
                name = re.sub(r"\W+", "-", f"{case.name}-{self.method}")
                ranks.keep_logs(self.logs, name)

    @property
    def outcome(self) -> str:
        """How the trial ended.

        "right": all survivors finished. "error": every survivor named a cause in time. The other
        outcomes are failures: "hung", "wrong", "unnamed", "late", "mixed", and "crash", which is a
        signal after an error that names its cause.
        """
        if not all(map(self._is_right, self._living)):
            return "wrong"
        if self.orphans or any(end.exitcode is None for end in self._living):
            return "hung"
        failed = [end for end in self._living if end.exitcode]
        if not failed:
            return "right"
        if len(failed) < len(self._living):
            return "mixed"
        if not all(_cause(end.error) for end in failed):
            return "unnamed"
        if any(end.exitcode < 0 for end in failed if end.exitcode):
            return "crash"
        return "error" if max(self.seconds_to_error) <= self.timeout + GRACE else "late"

    @property
    def seconds_to_error(self) -> list[float]:
        """For each survivor, the seconds from when it could notice the fault to its error."""
        found = []
        for number, end in enumerate(self.ends):
            if end.exitcode and end in self._living:
                stopped = self.case.kind == "stop" and number == self.case.victim
                began = self._fault + (self.case.seconds if stopped else 0)
                found.append(round((end.error_time or end.end_time or 0.0) - began, 1))
        return sorted(found)

    def record(self) -> Record:
        return {
            "fault": self.case.name,
            "method": self.method,
            "ranks": self.case.world,
            "outcome": self.outcome,
            "seconds_to_error": self.seconds_to_error,
            "causes": sorted({_cause(end.error) or end.error for end in self._living if end.error}),
            "retransmitted": sum(end.retransmitted for end in self._living),
        }

    @property
    def _living(self) -> list[End]:
        """The survivors: the ends of all ranks except one that kills itself."""
        victim = self.case.victim if self.case.kind == "kill" else None
        return [end for number, end in enumerate(self.ends) if number != victim]

    def _is_right(self, end: End) -> bool:
        complete = len(end.digests) == self.case.steps or end.exitcode != 0
        reference = list(self.reference[: len(end.digests)])
        return complete and (not self.reference or end.digests == reference)

    def _network(self) -> AbstractContextManager[Hosts | int]:
        case = self.case
        if not case.needs_links:
            return nullcontext(case.world)
        return Hosts(case.world, RATE, case.delay_ms, case.link)

    def _disturb(self, place: Hosts | int) -> None:
        """Causes the fault once the victim has reached the step."""
        case, victim = self.case, self.ends[self.case.victim]
        if case.kind == "kill":
            if isinstance(place, Hosts):
                self._listen(lambda: all(len(end.digests) >= FAULT_STEP for end in self.ends))
                for host in range(case.world):
                    place.set_rate(host, SLOW_RATE)
                for pipe in self._ranks.pipes:
                    pipe.send("go")
            self._listen(lambda: victim.exitcode is not None)
            self._fault = victim.fault_time or self._fault
        elif case.kind not in ("link", "none"):
            assert isinstance(place, Hosts)
            self._listen(lambda: len(victim.digests) >= FAULT_STEP)
            begin, end = self._switches(place)
            begin()
            self._fault = time.monotonic()
            self._listen(lambda: time.monotonic() > self._fault + case.seconds)
            end()

    def _switches(self, network: Hosts) -> tuple[Callable[[], None], Callable[[], None]]:
        """Functions that begin and end a lasting fault."""
        victim = self.case.victim
        if self.case.kind == "cut":
            return partial(network.cut, victim), partial(network.mend, victim)
        if self.case.kind == "stop":
            send = partial(os.kill, self._ranks.processes[victim].pid)
            return partial(send, signal.SIGSTOP), partial(send, signal.SIGCONT)
        set_rate = network.set_rate
        return partial(set_rate, victim, DROPPED_RATE), partial(set_rate, victim, RATE)

    def _listen(self, until: Callable[[], bool]) -> None:
        """Collects reports and exit codes, until `until()` is true or the trial takes too long."""
        while True:
            for end, pipe, process in zip(
                self.ends, self._ranks.pipes, self._ranks.processes, strict=True
            ):
                exitcode = process.exitcode  # read first: once set, the pipe holds all reports
                with suppress(EOFError, OSError):
                    while pipe.poll():
                        self._note(end, *pipe.recv())
                if end.exitcode is None and exitcode is not None:
                    end.exitcode, end.end_time = exitcode, time.monotonic()
            if until() or time.monotonic() > self._deadline:
                return
            time.sleep(0.005)

    def _note(self, end: End, name: str, value: Any) -> None:
        if name == "digest":
            end.digests.append(value)
        else:
            setattr(end, name, value)


def _cause(error: str) -> str:
    """The words of an error that name the cause, or an empty string."""
    found = _CAUSES.search(error)
    return found[0] if found else ""


def _sessions(leaders: set[int]) -> list[int]:
    """The processes still running in the session of one that has ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) in leaders and fields[0] not in "ZX":
            found.append(int(stat.parent.name))
    return found
