# SPDX-License-Identifier: BSD-3-Clause
"""One call: parts under time limits, each with a log and a verdict. Results stay current."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

RESERVE = 8  # seconds at the end of the call, for the summary and the archive
GRACE = 5  # seconds from the interrupt to the kill, for reports and cleanup
MISSING = 77  # exit status if something is missing, which the last line names
SHOWN = 30  # lines of a log
OK, NO_TIME, NOT_RUN = "ok", "NO TIME LEFT", "NOT RUN: "

# Output of programs that cannot run on this machine, which is not a failure.
_CANNOT_RUN = re.compile(r"^.*(Device not supported|cannot run here; missing).*$", re.MULTILINE)
_ALL_SKIPPED = re.compile(r"^=+ (?!.*passed).*\d+ skipped.* in [\d.]+s.*=$", re.MULTILINE)


@dataclass(frozen=True)
class Part:
    """A line of bash. It waits for ``needs``, a build; and for all that runs beside, if alone."""

    name: str
    limit: float  # seconds
    command: str
    needs: str = ""
    alone: bool = False  # because it measures time


class Runner:
    """Enforces the time limit of a call. Threads may run parts concurrently."""

    def __init__(self, logs: Path, seconds: float) -> None:
        self._logs = logs
        self._deadline = time.monotonic() + seconds - RESERVE
        self._live: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.RLock()  # a signal handler may call end() while it is held
        self._ended = False

    def log_of(self, name: str) -> str:
        log = self._logs / f"{name}.txt"
        return log.read_text(errors="replace") if log.exists() else ""

    def run(self, part: Part) -> str:
        """Returns the verdict: "ok", or what went wrong in a few words."""
        limit = min(part.limit, self._deadline - time.monotonic())
        with self._lock:
            if limit < 1 or self._ended:
                return NO_TIME
            with (self._logs / f"{part.name}.txt").open("wb") as log:
                process = subprocess.Popen(
                    ["bash", "-uc", part.command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            self._live.add(process)
        for kind, patience in ((None, limit), (signal.SIGINT, GRACE), (signal.SIGKILL, GRACE)):
            _send(process, kind)
            with suppress(subprocess.TimeoutExpired):  # what hangs in a driver survives a kill
                process.wait(patience)
                break
        _send(process, signal.SIGKILL)  # any children it left behind
        self._live.discard(process)
        if kind:
            return NO_TIME if limit < part.limit else f"TIME LIMIT of {limit:.0f} s"
        return _verdict(process.returncode, self.log_of(part.name))

    def end(self) -> None:
        """Kills whatever is still running, and starts nothing more."""
        with self._lock:
            self._ended = True
        for process in list(self._live):
            _send(process, signal.SIGKILL)


def _verdict(status: int, log: str) -> str:
    if status == 0:
        return "FAILED: every test was skipped" if _ALL_SKIPPED.search(log) else OK
    lines = [line for line in log.split("\n") if line.strip()][-40:] or ["no output"]
    said = _CANNOT_RUN.search("\n".join(lines))
    if said or status in (MISSING, 127):  # bash's status if there is no such program
        return NOT_RUN + (said[0] if said else lines[-1])
    crashed = -status if status < 0 else status - 128  # bash's, of what it ran
    return (
        f"CRASHED with {signal.Signals(crashed).name}" if crashed > 0 else f"FAILED with {status}"
    )


def _send(process: subprocess.Popen[bytes], kind: signal.Signals | None) -> None:
    """Sends a signal to the process and its children."""
    with suppress(ProcessLookupError):
        if kind:
            os.killpg(process.pid, kind)


class Call:
    def __init__(self, title: str, results: Path, output: Path, runner: Runner) -> None:
        self.verdicts: dict[str, str] = {}  # in the order in which the parts ended
        self._seconds: dict[str, float] = {}
        self._title, self._results, self._output = title, results, output
        self._runner = runner
        self._began = time.monotonic()
        self._changed = threading.Condition()

    def run(self, lanes: Sequence[Sequence[Part]], parts: Sequence[Part]) -> None:
        """Runs each lane's parts in their order. A part that has to wait lets others pass."""
        beside = {part.name for lane in lanes for part in lane}
        with ThreadPoolExecutor() as pool:
            try:
                running = [pool.submit(self._run, list(lane), beside) for lane in lanes]
                self._run(list(parts), beside)
                for lane in running:
                    lane.result()
            finally:
                self._runner.end()

    def _run(self, pending: list[Part], beside: set[str]) -> None:
        def ready() -> Part | None:
            waits = [beside if part.alone else {part.needs} & beside for part in pending]
            free = (p for p, w in zip(pending, waits, strict=True) if w <= self.verdicts.keys())
            return next(free, None)

        while pending:
            with self._changed:
                part = self._changed.wait_for(ready)
            assert part
            pending.remove(part)
            began = time.monotonic()
            build = self.verdicts.get(part.needs, OK)
            why = f"{NOT_RUN}{part.needs}: {build.removeprefix(NOT_RUN)}"
            verdict = self._runner.run(part) if build == OK else why
            with self._changed:
                self._seconds[part.name] = time.monotonic() - began
                self.verdicts[part.name] = verdict
                self._changed.notify_all()
                shown = self._runner.log_of(part.name).rstrip().split("\n")[-SHOWN:]
                print(self._line(part.name), *shown, sep="\n", flush=True)
                self._write()

    def _line(self, name: str) -> str:
        return f"== {name} {self._seconds[name]:.0f} s: {self.verdicts[name]}"

    def summary(self) -> str:
        title = f"{self._title}, {time.monotonic() - self._began:.0f} s"
        return "\n".join([title, *map(self._line, self.verdicts)]) + "\n"

    def _write(self) -> None:
        """Replaces each file atomically, so that it is complete at any time."""
        (self._output / "verdicts.json").write_text(json.dumps(self.verdicts))
        archive, summary = self._results / "results.tar.gz", self._results / "summary.txt"
        tar = ["tar", "--ignore-failed-read", "-czf", f"{archive}.part", self._output.name]
        subprocess.run(tar, cwd=self._output.parent, capture_output=True)
        Path(f"{archive}.part").replace(archive)
        Path(f"{summary}.part").write_text(self.summary())
        Path(f"{summary}.part").replace(summary)
