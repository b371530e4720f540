# SPDX-License-Identifier: BSD-3-Clause
"""Tells how training ends when links and ranks fail, with plain Gloo and with ours.

    python benchmarks/bench_faults.py --json faults.json --logs logs
    python benchmarks/bench_faults.py --only stopped killed
    python benchmarks/bench_faults.py --show faults.json

A small model trains in exact steps and then in compressed ones (rank 16, int8). A fault happens in
a compressed step. All living ranks must end with the parameters of an undisturbed run, to the bit,
or with an error that names the cause, within 15 s after the process group's time-out.

The hosts are network namespaces, which need root, ip and tc. The links are emulated
(cluster/emulated_links.py). Without root, only those kills are tried that need no link.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from cluster import hosts, signals
from faults import tables
from faults.cases import CASES, RATE, TIMEOUT, Case
from faults.trial import METHODS, Trial
from provenance import heading, processor, provenance, write
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from text_tables import print_tables

_COLUMNS = (TextColumn("{task.description:<60}"), BarColumn(), MofNCompleteColumn())


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", metavar="WORDS", help="parts of the names of faults to try (all)")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="methods (all)")
    add("--timeout", type=float, default=TIMEOUT, help=f"the group's, in seconds ({TIMEOUT:g})")
    add("--at-once", type=int, default=3, help="number of trials that run at a time (3)")
    add("--json", type=Path, help="file for the results, written after every trial")
    add("--logs", type=Path, help="folder for the output of ranks that do not end as they should")
    add("--show", type=Path, metavar="JSON", help="results to show; nothing is tried")
    return parser.parse_args(words)


def chosen(arguments: argparse.Namespace) -> list[Case]:
    """The cases that are asked for and possible here."""
    cases = [
        case
        for case in CASES
        if not arguments.only or any(words in case.name for words in arguments.only)
    ]
    if not cases:
        sys.exit(f"no fault has any of these words: {', '.join(arguments.only)}")
    if lacks := hosts.missing():
        print(f"left out: all that needs a link; missing: {', '.join(lacks)}")
        cases = [case for case in cases if not case.needs_links]
    return cases


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    cases = chosen(arguments)
    record: dict[str, Any] = {
        **provenance(processor()),
        "cores": os.cpu_count(),
        "timeout": arguments.timeout,
        "rate": RATE,
        "trials": [],
    }
    runs = [(case, method) for case in cases for method in arguments.methods]
    undisturbed = dict.fromkeys((case.undisturbed(), method) for case, method in runs)
    with Progress(*_COLUMNS, TimeElapsedColumn()) as progress:
        bar = progress.add_task("", total=len(undisturbed) + len(runs))

        def run(trials: list[Trial]) -> Iterator[Trial]:
            for trial in run_in_turns(trials, arguments.at_once):
                progress.update(bar, advance=1, description=f"{trial.case.name}, {trial.method}")
                yield trial

        references: dict[tuple[Case, str], list[str]] = {}
        for trial in run([Trial(*key) for key in undisturbed]):
            if trial.outcome != "right":
                raise RuntimeError(f"an undisturbed run of {trial.method}: {trial.ends}")
            references[trial.case, trial.method] = trial.digests
        trials = [
            Trial(
                case,
                method,
                references[case.undisturbed(), method],
                arguments.logs,
                arguments.timeout,
            )
            for case, method in runs
        ]
        for _ in run(trials):
            record["trials"] = [each.record() for each in trials if each.ends]
            write(record, arguments.json)
    return record


def run_in_turns(trials: list[Trial], at_once: int) -> Iterator[Trial]:
    """Runs so many trials at a time. Yields each that has ended."""
    waiting = list(trials)
    running: list[tuple[Trial, Generator[None]]] = []
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                trial = waiting.pop(0)
                running.append((trial, trial.run()))
            for trial, turns in list(running):
                if next(turns, "ended") == "ended":
                    running.remove((trial, turns))
                    yield trial
            time.sleep(0.005)
    finally:
        for _, turns in running:
            turns.close()


def show(record: dict[str, Any]) -> None:
    """Prints the table of the page."""
    console = heading(record, f"time-out {record['timeout']:g} s")
    print_tables(console, {"faults": tables.faults(record)})


def main() -> None:
    arguments = parse_arguments()
    signals.unwind_on_signals()
    if arguments.show:
        show(json.loads(arguments.show.read_text()))
        return
    try:
        if not hosts.missing():
            hosts.sweep()
        show(measure(arguments))
    except hosts.ClusterError as error:
        sys.exit(f"bench_faults: {error}")


if __name__ == "__main__":
    main()
