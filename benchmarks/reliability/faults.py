# SPDX-License-Identifier: BSD-3-Clause
"""Shows how training ends when links and processes fail, over plain Gloo and over powersgd.

A small model trains with exact steps and then with compressed ones (matrix rank 16, int8). The
fault happens in a compressed step. All surviving processes must end with the parameters of an
undisturbed run, bit for bit, or with an error that names the cause, at most 15 s after the process
group's timeout.

Hosts are network namespaces, which need root, ip and tc. Links are emulated
(launcher/emulated_links.py).
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from launcher import hosts
from launcher.ranks import Ranks
from report import Record, Table, in_turn, provenance, write

from reliability.cases import AIMED, CASES, FAULT_STEP, Case
from reliability.training import train

METHODS = ("plain", "ours")
RATE, DROPPED_RATE = "100mbit", "1mbit"
SLOW_RATE = "100kbit"  # slow enough that a stage takes seconds, so that a kill can hit it
TIMEOUT = 20.0  # seconds, of the process group
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
    error_time: float = 0
    fault_time: float = 0  # when it killed itself

    @property
    def cause(self) -> str:
        """The words of the error that name its cause, or an empty string."""
        found = _CAUSES.search(self.error)
        return found[0] if found else ""


class Trial:
    """A case with one method, "plain" or "ours", and the timeout of its group.

    `reference` has the digests of an undisturbed run. Without them, any parameters are right.
    """

    def __init__(
        self, case: Case, method: str, reference: Sequence[str] = (), timeout: float = TIMEOUT
    ) -> None:
        self.case, self.method, self.reference, self.timeout = case, method, reference, timeout
        self.ends = [End() for _ in range(case.world)]
        self._fault = 0.0  # the time of the fault

    def run(self) -> Trial:
        case = self.case
        with (
            hosts.Hosts(case.world, RATE, case.delay_ms, case.link) as network,
            Ranks(train, network, case, self.method, self.timeout) as self._ranks,
        ):
            self._deadline = time.monotonic() + LIMIT
            self._disturb(network)
            self._listen(lambda: all(end.exitcode is not None for end in self.ends))
            for process in self._ranks.running:
                process.kill()
        return self

    @property
    def outcome(self) -> str:
        """How the trial ended.

        "right": all survivors finished. "error": all of them named a cause in time. Failures are
        "wrong" parameters, processes that "hung", and "other" ends, such as a crash.
        """
        ends = [end for _, end in self._living]
        if not all(map(self._is_right, ends)):
            return "wrong"
        if any(end.exitcode is None for end in ends):
            return "hung"
        if not any(end.exitcode for end in ends):
            return "right"
        named = all(end.exitcode == 1 and end.cause for end in ends)
        return "error" if named and self.seconds_to_error[-1] <= self.timeout + GRACE else "other"

    @property
    def seconds_to_error(self) -> list[float]:
        """For each survivor, the seconds from when it could notice the fault to its error."""
        found = []
        for number, end in self._living:
            if end.exitcode:
                stopped = self.case.kind == "stop" and number == self.case.victim
                began = self._fault + (self.case.seconds if stopped else 0)
                found.append(round(end.error_time - began, 1))
        return sorted(found)

    def record(self) -> Record:
        return {
            "fault": self.case.name,
            "method": self.method,
            "ranks": self.case.world,
            "outcome": self.outcome,
            "seconds_to_error": self.seconds_to_error,
            "causes": sorted({end.cause or end.error for _, end in self._living if end.error}),
        }

    @property
    def _living(self) -> list[tuple[int, End]]:
        """The survivors: all ranks except one that kills itself."""
        victim = self.case.victim if self.case.kind == "kill" else None
        return [(number, end) for number, end in enumerate(self.ends) if number != victim]

    def _is_right(self, end: End) -> bool:
        complete = len(end.digests) == self.case.steps or end.exitcode != 0
        reference = list(self.reference[: len(end.digests)])
        return complete and (not self.reference or end.digests == reference)

    def _disturb(self, network: hosts.Hosts) -> None:
        """Causes the fault once the victim has reached the step."""
        case, victim = self.case, self.ends[self.case.victim]
        if case.stage in AIMED:
            self._listen(lambda: all(len(end.digests) >= FAULT_STEP for end in self.ends))
            for host in range(case.world):
                network.set_rate(host, SLOW_RATE)
            for pipe in self._ranks.pipes:
                pipe.send("go")
        if case.kind == "kill":
            self._listen(lambda: victim.exitcode is not None)
            self._fault = victim.fault_time
        elif case.kind not in ("link", "none"):
            self._listen(lambda: len(victim.digests) >= FAULT_STEP)
            self._switch(network, True)
            self._fault = time.monotonic()
            self._listen(lambda: time.monotonic() > self._fault + case.seconds)
            self._switch(network, False)

    def _switch(self, network: hosts.Hosts, on: bool) -> None:
        """Begins or ends a lasting fault."""
        victim = self.case.victim
        if self.case.kind == "cut":
            (network.cut if on else network.mend)(victim)
        elif self.case.kind == "stop":
            os.kill(self._ranks.processes[victim].pid, signal.SIGSTOP if on else signal.SIGCONT)
        else:
            network.set_rate(victim, DROPPED_RATE if on else RATE)

    def _listen(self, until: Callable[[], bool]) -> None:
        """Collects reports and exit codes, until `until()` is true or the trial takes too long."""
        while True:
            of_ranks = zip(self.ends, self._ranks.pipes, self._ranks.processes, strict=True)
            for end, pipe, process in of_ranks:
                exitcode = process.exitcode  # read first: once set, the pipe holds all reports
                with suppress(EOFError, OSError):
                    while pipe.poll():
                        name, value = pipe.recv()
                        if name == "digest":
                            end.digests.append(value)
                        else:
                            setattr(end, name, value)
                end.exitcode = exitcode
            if until() or time.monotonic() > self._deadline:
                return
            time.sleep(0.005)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    of_words = "run the faults whose names contain any of these words (all)"
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORDS", help=of_words)


def measure(arguments: argparse.Namespace) -> Record:
    if lacks := hosts.missing():
        sys.exit(f"faults cannot run here; missing: {', '.join(lacks)}")
    hosts.sweep()
    about = {"cores": os.cpu_count(), "timeout": TIMEOUT, "rate": RATE}
    record: Record = {**provenance(), **about, "trials": []}
    cases = [case for case in CASES if any(words in case.name for words in arguments.only)]
    todo = [(case, method) for case in cases for method in METHODS]
    references: dict[tuple[Case, str], list[str]] = {}
    for case, method in in_turn(todo, lambda each: f"{each[0].name}, {each[1]}"):
        key = case.undisturbed(), method
        if key not in references:
            quiet = Trial(*key).run()
            if quiet.outcome != "right":
                raise RuntimeError(f"an undisturbed run of {method} failed: {quiet.ends}")
            references[key] = quiet.ends[0].digests
        record["trials"].append(Trial(case, method, references[key]).run().record())
        write(record, arguments.json)
    return record


def outcomes(record: Record) -> Table:
    """The outcome of each fault, and the seconds until the survivors of ours have their errors.

    Where the outcomes of the methods differ, there is one for each, in the order of the record.
    """
    by_fault: dict[str, dict[str, Record]] = {}
    for trial in record["trials"]:
        by_fault.setdefault(trial["fault"], {})[trial["method"]] = trial
    rows = []
    for fault, trials in by_fault.items():
        ends = dict.fromkeys(trial["outcome"] for trial in trials.values())
        seconds = trials["ours"]["seconds_to_error"] if "ours" in trials else []
        least_and_most = dict.fromkeys(f"{each(seconds):.1f}" for each in (min, max) if seconds)
        rows.append([fault, " / ".join(ends), " to ".join(least_and_most)])
    return ["fault", "outcome", "seconds to the error"], rows


def tables_of(record: Record) -> dict[str, Table]:
    return {f"faults, timeout {record['timeout']:g} s": outcomes(record)}


def problems(record: Record) -> list[str]:
    return [
        f"{trial['fault']}, {trial['method']}: {trial['outcome']}"
        for trial in record["trials"]
        if trial["outcome"] not in ("right", "error")
    ]
