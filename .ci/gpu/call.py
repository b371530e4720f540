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
    """A line of bash. It waits for ``needs``, a build; and for all that runs beside, if alone."""

    name: str
    limit: float  # seconds
    command: str
    needs: str = ""
    alone: bool = False  # because it measures time


class Call:
    def __init__(self, title: str, results: Path, seconds: float, earlier: dict[str, str]) -> None:
        self.verdicts: dict[str, str] = {}  # in the order in which the parts ended
        self._seconds: dict[str, float] = {}
        self._title, self._results, self._earlier = title, results, earlier
        self._began = time.monotonic()
        self._deadline = self._began + seconds - RESERVE
        self._live: set[subprocess.Popen[bytes]] = set()
        self._ended = False
        self._changed = threading.Condition()

    def run(self, queues: Sequence[Sequence[Part]], parts: Sequence[Part]) -> None:
        """Runs each queue's parts in their order. A part that has to wait lets others pass."""
        beside = {part.name for queue in queues for part in queue}
        with ThreadPoolExecutor() as pool:
            try:
                running = [pool.submit(self._run, list(queue), beside) for queue in queues]
                self._run(list(parts), beside)
                for queue in running:
                    queue.result()
            finally:
                self.end()

    def end(self) -> None:
        """Kills whatever is still running, and starts nothing more."""
        with self._changed:
            self._ended = True
            for process in self._live:
                _kill(process)

    def summary(self) -> str:
        title = f"{self._title}, {time.monotonic() - self._began:.0f} s"
        return "\n".join([title, *map(self._line, self.verdicts)]) + "\n"

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
            log = OUTPUT / "logs" / f"{part.name}.txt"
            build = self.verdicts.get(part.needs, OK)
            why = f"{NOT_RUN}{part.needs}: {build.removeprefix(NOT_RUN)}"
            verdict = self._execute(part, log) if build == OK else why
            with self._changed:
                self._seconds[part.name] = time.monotonic() - began
                self.verdicts[part.name] = verdict
                self._changed.notify_all()
                print(self._line(part.name), *_read(log)[-SHOWN:], sep="\n", flush=True)
                self._write()

    def _execute(self, part: Part, log: Path) -> str:
        """Returns the verdict: "ok", or what went wrong in a few words."""
        limit = min(part.limit, self._deadline - time.monotonic())
        words = f"timeout --signal INT --kill-after {GRACE} {limit:.0f} bash -uc".split()
        with self._changed:
            if limit < 1 or self._ended:
                return NO_TIME
            with log.open("wb") as file:
                process = subprocess.Popen(
                    [*words, part.command],
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                )
            self._live.add(process)
        status = process.wait()
        _kill(process)  # any children it left behind
        self._live.discard(process)
        if status in TIMED_OUT:
            return NO_TIME if limit < part.limit else f"TIME LIMIT of {limit:.0f} s"
        return _verdict(status, _read(log))

    def _line(self, name: str) -> str:
        return f"== {name} {self._seconds[name]:.0f} s: {self.verdicts[name]}"

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
    return (
        f"CRASHED with {signal.Signals(status - 128).name}"
        if status > 128
        else f"FAILED with {status}"
    )


def _read(log: Path) -> list[str]:
    return log.read_text(errors="replace").strip().split("\n") if log.exists() else []


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and its children."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
