# SPDX-License-Identifier: BSD-3-Clause
"""The tables of bench_reliability.py and of tests/python/other_suites."""

from __future__ import annotations

from report import Record, Table

_BACKENDS = {
    "cpu:powersgd": "`cpu:powersgd`",
    "attached": "`cpu:powersgd`, attached",
}


def suites(record: Record) -> Table:
    """How many tests of each suite have the same result as with Gloo."""
    headings = ["suite", "backend", "ranks", "tests", "passed as with Gloo", "skipped as with Gloo"]
    headings += ["fail over Gloo", "differences"]
    rows = [
        [row["suite"], _BACKENDS[row["backend"]]]
        + [str(row[field]) for field in ("ranks", "tests", "passed", "skipped", "fail over gloo")]
        + [str(len(row["differences"]))]
        for row in record["rows"]
    ]
    return headings, rows


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


def kills(record: Record) -> Table:
    """What the killed process was doing, and whether it left an unfinished checkpoint."""
    rows = [
        [doing, str(counts["kills"]), str(counts["unfinished_files"])]
        for doing, counts in record["kills"].items()
    ]
    return ["the killed process was", "kills", "left an unfinished file"], rows
