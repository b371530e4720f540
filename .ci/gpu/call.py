# SPDX-License-Identifier: BSD-3-Clause
"""One call: builds run in the background, parts one after another, and results are kept current."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

import parts
from commands import LOGS, OUTPUT
from results import archive, replace
from runner import Part, Runner, Verdict, read
from summary_text import summary

RENEWED_EVERY = 10  # seconds
VERDICTS = OUTPUT / "verdicts.json"


class Call:
    def __init__(
        self, title: str, results: Path, runner: Runner, earlier: Mapping[str, Verdict]
    ) -> None:
        self.failed = False
        self._verdicts = dict(earlier)
        self._title = title
        self._results = results
        self._runner = runner
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._writing = threading.Lock()
        self._running: dict[Future[Verdict], str] = {}  # the builds

    def run(self, builds: Sequence[Part], pending: Sequence[Part]) -> None:
        wanted = {name for part in pending for name in (part.needs, *part.after)}
        with ThreadPoolExecutor() as pool:
            pool.submit(self._renew)
            try:
                for build in builds:
                    if build.name in wanted:
                        self._running[pool.submit(self._runner.run, build)] = build.name
                self._run(list(pending))
            finally:
                self._runner.end()
                self._ended.set()
                self._write()

    def _run(self, pending: list[Part]) -> None:
        """Runs the parts. The next one is always the first that is not waiting for a build."""
        while pending:
            self._take_builds(0)
            ready = next((part for part in pending if self._is_ready(part)), None)
            if ready is None:
                self._take_builds(None)
                continue
            pending.remove(ready)
            self._report(ready.name, self._verdict(ready))
            if ready.name == "smoke":
                pending = parts.after_smoke(self._verdicts["smoke"], pending)

    def _is_ready(self, part: Part) -> bool:
        return not {part.needs, *part.after} & set(self._running.values())

    def _take_builds(self, timeout: float | None) -> None:
        """Reports finished builds, waiting at most ``timeout`` seconds for one."""
        for build in wait(self._running, timeout, FIRST_COMPLETED).done:
            self._report(self._running.pop(build), build.result())

    def _verdict(self, part: Part) -> Verdict:
        build = self._verdicts.get(part.needs, Verdict("ok"))
        if not build.ok:
            return Verdict(f"NOT RUN: {part.needs}: {build.text.removeprefix('NOT RUN: ')}")
        return self._runner.run(part)

    def _report(self, name: str, verdict: Verdict) -> None:
        self._verdicts[name] = verdict
        self.failed |= verdict.is_failure
        self._write()
        print(f"== {name} {verdict.seconds:.0f} s: {verdict.text}", flush=True)
        if verdict.is_failure:
            print(*read(LOGS / f"{name}.txt").split("\n")[-20:], sep="\n", flush=True)

    def _renew(self) -> None:
        while not self._ended.wait(RENEWED_EVERY):
            self._write()

    def _write(self) -> None:
        with self._writing:
            title = f"{self._title}, {time.monotonic() - self._began:.0f} s"
            verdicts = dict(self._verdicts)
            as_json = {name: dataclasses.asdict(verdict) for name, verdict in verdicts.items()}
            replace(VERDICTS, json.dumps(as_json, indent=1).encode())
            replace(self._results / "summary.txt", summary(title, verdicts, OUTPUT).encode())
            replace(self._results / "results.tar.gz", archive(OUTPUT))


def earlier_verdicts() -> dict[str, Verdict]:
    """The verdicts of the previous call, if it ran here."""
    if not VERDICTS.exists():
        return {}
    return {name: Verdict(**saved) for name, saved in json.loads(VERDICTS.read_text()).items()}
