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
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

OUTPUT = Path(__file__).resolve().parents[2] / "build/gpu/output"  # what goes into the archive
RESERVE = 8  # seconds at the end of the call, for the summary and the archive
GRACE = 5  # seconds from the interrupt to the kill, for reports and cleanup
MISSING = (77, 127)  # exit status if something is missing, which the last line names
TIMED_OUT = (124, -signal.SIGKILL)  # exit status of what is interrupted, or killed
SHOWN = 30  # lines of a log
OK, NO_TIME, NOT_RUN = "ok", "NO TIME LEFT", "NOT RUN: "

# Output of programs that cannot run on this machine, which is not a failure.
_CANNOT_RUN = re.compile("Device not supported|cannot run here; missing")
_ALL_SKIPPED = re.compile(r"=+ (?!.*passed).*\d+ skipped.* in [\d.]+s.*=")


@dataclass(frozen=True)
class Part:
    """A line of bash, which waits for the build that it needs."""

    name: str
    limit: float  # seconds
    command: str
    needs: str = ""
    alone: bool = False  # because it measures time
    beside: bool = False  # the others, because it needs neither Python nor a clock


class Call:
    def __init__(self, title: str, results: Path, seconds: float, earlier: dict[str, str]) -> None:
        self.verdicts: dict[str, str] = {}  # in the order in which the parts ended
        self._lines: list[str] = []
        self._builds: dict[str, Future[str]] = {}
        self._title, self._results, self._earlier = title, results, earlier
        self._began = time.monotonic()
        self._deadline = self._began + seconds - RESERVE
        self._live: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()

    def run(self, builds: Sequence[Part], parts: Sequence[Part]) -> None:
        """Runs the parts in their order, and up to two builds and parts beside them."""
        with ThreadPoolExecutor(2) as pool:
            try:
                self._builds = {part.name: pool.submit(self._run, part) for part in builds}
                beside = [pool.submit(self._run, part) for part in parts if part.beside]
                beside += self._builds.values()
                for part in parts:
                    wait(beside if part.alone else [])
                    if not part.beside:
                        self._run(part)
                wait(beside)
            finally:
                self.end()

    def end(self) -> None:
        """Kills whatever is still running, and starts nothing more."""
        with self._lock:
            self._deadline = 0.0
            for process in self._live:
                _kill(process)

    def summary(self) -> str:
        title = f"{self._title}, {time.monotonic() - self._began:.0f} s"
        return "\n".join([title, *self._lines]) + "\n"

    def _run(self, part: Part) -> str:
        build = self._builds[part.needs].result() if part.needs else OK
        began = time.monotonic()
        log = OUTPUT / "logs" / f"{part.name}.txt"
        why = f"{NOT_RUN}{part.needs}: {build.removeprefix(NOT_RUN)}"
        verdict = self._execute(part, log) if build == OK else why
        with self._lock:
            self.verdicts[part.name] = verdict
            self._lines.append(f"== {part.name} {time.monotonic() - began:.0f} s: {verdict}")
            print(self._lines[-1], *_read(log)[-SHOWN:], sep="\n", flush=True)
            self._write()
        return verdict

    def _execute(self, part: Part, log: Path) -> str:
        """Returns the verdict: "ok", or what went wrong in a few words."""
        with self._lock:
            limit = min(part.limit, self._deadline - time.monotonic())
            if limit < 1:
                return NO_TIME
            words = f"timeout --signal INT --kill-after {GRACE} {limit:.0f} bash -uc".split()
            words.append(part.command)
            with log.open("wb") as file:
                process = subprocess.Popen(words, stdout=file, stderr=file, start_new_session=True)
            self._live.add(process)
        status = process.wait()
        _kill(process)  # any children it left behind
        self._live.discard(process)
        if status in TIMED_OUT:
            return NO_TIME if limit < part.limit else f"TIME LIMIT of {limit:.0f} s"
        return _verdict(status, _read(log))

    def _write(self) -> None:
        """Keeps the results complete: a call may be killed."""
        known = {**self._earlier, **self.verdicts}
        (OUTPUT / "verdicts.json").write_text(json.dumps(known))
        archive, summary = self._results / "results.tar.gz", self._results / "summary.txt"
        tar = ["tar", "--ignore-failed-read", "-czf", f"{archive}.part", OUTPUT.name]
        subprocess.run(tar, cwd=OUTPUT.parent, capture_output=True)
        Path(f"{archive}.part").replace(archive)
        summary.write_text(self.summary())


def _verdict(status: int, lines: list[str]) -> str:
    if status == 0:
        skipped = lines and _ALL_SKIPPED.fullmatch(lines[-1])
        return "FAILED: every test was skipped" if skipped else OK
    said = [line for line in lines[-40:] if _CANNOT_RUN.search(line)]
    if said or status in MISSING:
        return NOT_RUN + [*lines, *said][-1]
    if status > 128:
        return f"CRASHED with {signal.Signals(status - 128).name}"
    return f"FAILED with {status}"


def _read(log: Path) -> list[str]:
    return log.read_text(errors="replace").strip().split("\n") if log.exists() else []


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and its children."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
