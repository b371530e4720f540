# SPDX-License-Identifier: BSD-3-Clause
"""Runs commands under time limits. Each command has a log, and each part of the call a verdict."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import outcomes

RESERVE = 8  # seconds at the end of the call, for the summary and the archive
GRACE = 5  # seconds from the interrupt to the kill, for pytest's report and bench_cluster's cleanup
TIME_LIMIT = "TIME LIMIT"
NO_TIME = "NO TIME LEFT"  # the call's time is up
MISSING = 77  # exit status if something is missing, which the command's last line names

# Output of programs that cannot run on this machine, which is not a failure.
CANNOT_RUN = re.compile(
    r"^.*(Device not supported|cannot run here; missing|LibraryNotLoaded|ERR_NVGPUCTRPERM).*$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Command:
    words: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    name: str = ""  # set if the part has several commands


@dataclass(frozen=True)
class Part:
    """Commands that share a time limit and a verdict."""

    name: str
    limit: float
    commands: Sequence[Command] | Callable[[], Sequence[Command]]
    needs: str = ""  # the build without which it cannot run
    after: Sequence[str] = ()  # builds that must not run at the same time
    at_once: int = 1
    tests: Callable[[str], dict[str, str]] = lambda log: {}  # reads the tests' outcomes


@dataclass(frozen=True)
class Verdict:
    text: str  # "ok", or what went wrong in a few words
    seconds: float = 0
    tests: Mapping[str, str] = field(default_factory=dict)  # the outcome of each

    @property
    def ok(self) -> bool:
        return self.text == "ok"

    @property
    def no_time(self) -> bool:
        return self.text.startswith(NO_TIME)

    @property
    def is_failure(self) -> bool:
        return not self.ok and not self.text.startswith("NOT RUN")

    @property
    def failed(self) -> list[str]:
        return [name for name, end in self.tests.items() if end not in outcomes.HARMLESS]


def words_of(status: int, log: Path) -> str:
    """A verdict on an exit status."""
    if status == 0:
        return "ok"
    lines = read(log).split("\n")
    said = CANNOT_RUN.search("\n".join(lines[-40:]))
    if said or status == MISSING:
        last = next((line for line in reversed(lines) if line.strip()), "no output")
        return f"NOT RUN: {said[0] if said else last}"
    if status < 0:
        return f"CRASHED with {signal.Signals(-status).name}"
    return f"FAILED with {status}"


def read(log: Path) -> str:
    return log.read_text(errors="replace") if log.exists() else ""


class Runner:
    """Enforces the time limit of a call, and keeps its logs. Threads may run parts concurrently."""

    def __init__(self, logs: Path, seconds: float, longest: float) -> None:
        self._logs = logs
        self._deadline = time.monotonic() + seconds - RESERVE
        self._longest = longest
        self._live: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.RLock()  # a signal handler may call end() while it is held
        self._ended = False

    def run(self, part: Part) -> Verdict:
        own_limit = min(part.limit, self._longest)
        limit = min(own_limit, self._deadline - time.monotonic())
        if limit < 1:
            return Verdict(NO_TIME)
        began = time.monotonic()
        commands = part.commands() if callable(part.commands) else part.commands
        logs = [self._logs / part.name / f"{c.name}.txt" for c in commands]
        if len(commands) == 1:
            logs = [self._logs / f"{part.name}.txt"]

        def one(command: Command, log: Path) -> str:
            left = began + limit - time.monotonic()
            return self._execute(command, log, left) if left > 0 else NO_TIME

        with ThreadPoolExecutor(part.at_once) as pool:
            texts = list(pool.map(one, commands, logs))
        tests = {name: end for log in logs for name, end in part.tests(read(log)).items()}
        bad = [f"{c.name} {t}" for c, t in zip(commands, texts, strict=True) if t != "ok"]
        text = texts[0] if len(commands) == 1 else "ok"
        if bad and len(commands) > 1:
            text = f"{len(bad)} of {len(commands)}: {'; '.join(bad[:3])}"
        if limit < own_limit and text.startswith(TIME_LIMIT):
            text = f"{NO_TIME} after {limit:.0f} s"
        if text == "ok" and tests and outcomes.PASSED not in tests.values():
            text = "FAILED: every test was skipped"
        return Verdict(text, time.monotonic() - began, tests)

    def _execute(self, command: Command, log: Path, limit: float) -> str:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            try:
                process = self._start(command, output)
            except FileNotFoundError:
                return f"NOT RUN: there is no {command.words[0]}"
        text = ""
        # A process that ignores the interrupt is killed. One that hangs in a driver survives even
        # that; give up on it.
        for kind, patience in ((None, limit), (signal.SIGINT, GRACE), (signal.SIGKILL, GRACE)):
            if kind:
                text = f"{TIME_LIMIT} of {limit:.0f} s"
                _send(process, kind)
            with suppress(subprocess.TimeoutExpired):
                process.wait(patience)
                break
        _send(process, signal.SIGKILL)  # any children it left behind
        self._live.discard(process)
        return text or words_of(process.returncode, log)

    def _start(self, command: Command, output: IO[bytes]) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._ended:
                raise FileNotFoundError
            process = subprocess.Popen(
                command.words,
                env={**os.environ, **command.env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._live.add(process)
            return process

    def end(self) -> None:
        """Kills whatever is still running, and starts nothing more."""
        with self._lock:
            self._ended = True
        for process in list(self._live):
            _send(process, signal.SIGKILL)


def _send(process: subprocess.Popen[bytes], kind: signal.Signals) -> None:
    """Sends a signal to the process and its children."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, kind)
