# SPDX-License-Identifier: BSD-3-Clause
"""Tells how training ends when links and ranks fail, with plain Gloo and with ours.

A small model trains in exact steps and then in compressed ones (rank 16, int8). A fault happens in
a compressed step. All living ranks must end with the parameters of an undisturbed run, to the bit,
or with an error that names the cause, within 15 s after the process group's time-out.

The hosts are network namespaces, which need root, ip and tc. The links are emulated
(launcher/emulated_links.py). Without root, only those kills are tried that need no link.
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
    add("--only", nargs="+", metavar="WORDS", help="parts of the names of faults to try (all)")
    add("--methods", nargs="+", choices=METHODS, default=METHODS, help="methods (all)")
    add("--timeout", type=float, default=TIMEOUT, help=f"the group's, in seconds ({TIMEOUT:g})")
    add("--logs", type=Path, help="folder for the output of ranks that do not end as they should")


def chosen(arguments: argparse.Namespace) -> list[Case]:
    """The cases that are asked for and possible here."""
    words = arguments.only or [""]
    cases = [case for case in CASES if any(each in case.name for each in words)]
    if not cases:
        sys.exit(f"no fault has any of these words: {', '.join(words)}")
    if lacks := hosts.missing():
        print(f"left out: all that needs a link; missing: {', '.join(lacks)}")
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
        raise RuntimeError(f"an undisturbed run of {method}: {trial.ends}")
    return trial.ends[0].digests


def tables_of(record: Record) -> dict[str, Table]:
    return {f"faults, time-out {record['timeout']:g} s": tables.faults(record)}


def problems(record: Record) -> list[str]:
    """The trials that have not ended as they should."""
    return [
        f"{trial['fault']}, {trial['method']}: {trial['outcome']}"
        for trial in record["trials"]
        if trial["outcome"] not in ("right", "error")
    ]
