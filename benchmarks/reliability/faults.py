# SPDX-License-Identifier: BSD-3-Clause
"""Shows how training ends when links and processes fail, over plain Gloo and over powersgd.

A small model trains with exact steps and then with compressed ones (matrix rank 16, int8). The
fault happens in a compressed step. All surviving processes must end with the parameters of an
undisturbed run, bit for bit, or with an error that names the cause, at most 15 s after the process
group's timeout.

Hosts are network namespaces, which need root, ip and tc. Links are emulated
(launcher/emulated_links.py). Without root, only the kills that need no link are tried.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from launcher import hosts
from report import Record, Table, in_turn, processor, provenance, write

from reliability import tables
from reliability.cases import CASES, METHODS, RATE, TIMEOUT, Case
from reliability.trial import Trial


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--only",
        nargs="+",
        metavar="WORDS",
        help="run the faults whose names contain any of these words (all)",
    )
    add("--methods", nargs="+", choices=METHODS, default=METHODS, help="methods (all)")
    add(
        "--timeout",
        type=float,
        default=TIMEOUT,
        help=f"process group's timeout, in seconds ({TIMEOUT:g})",
    )
    add("--logs", type=Path, help="folder for the output of failed trials")


def chosen(arguments: argparse.Namespace) -> list[Case]:
    """The requested cases that can run here."""
    words = arguments.only or [""]
    cases = [case for case in CASES if any(each in case.name for each in words)]
    if not cases:
        sys.exit(f"no fault has any of these words: {', '.join(words)}")
    if lacks := hosts.missing():
        print(f"left out: faults that need a link; missing: {', '.join(lacks)}")
        cases = [case for case in cases if not case.needs_links]
    return cases


def measure(arguments: argparse.Namespace) -> Record:
    if not hosts.missing():
        hosts.sweep()
    record: Record = {
        **provenance(processor()),
        "cores": os.cpu_count(),
        "timeout": arguments.timeout,
        "rate": RATE,
        "trials": [],
    }
    todo = [Trial(case, method) for case in chosen(arguments) for method in arguments.methods]
    references: dict[tuple[Case, str], list[str]] = {}
    for trial in in_turn(todo, lambda trial: f"{trial.case.name}, {trial.method}"):
        trial.timeout, trial.logs = arguments.timeout, arguments.logs
        key = trial.case.undisturbed(), trial.method
        if key not in references:
            references[key] = undisturbed(*key)
        trial.reference = references[key]
        trial.run()
        record["trials"].append(trial.record())
        write(record, arguments.json)
    return record


def undisturbed(case: Case, method: str) -> list[str]:
    """The digest after each step of a run in which nothing happens."""
    trial = Trial(case, method)
    trial.run()
    if trial.outcome != "right":
        raise RuntimeError(f"an undisturbed run of {method} failed: {trial.ends}")
    return trial.ends[0].digests


def tables_of(record: Record) -> dict[str, Table]:
    return {f"faults, timeout {record['timeout']:g} s": tables.faults(record)}


def problems(record: Record) -> list[str]:
    """The trials with a wrong outcome."""
    return [
        f"{trial['fault']}, {trial['method']}: {trial['outcome']}"
        for trial in record["trials"]
        if trial["outcome"] not in ("right", "error")
    ]
