# SPDX-License-Identifier: BSD-3-Clause
"""The table of docs/reliability.md, from a record of bench_faults.py."""

from __future__ import annotations

from typing import Any

from text_tables import Table

Record = dict[str, Any]

_WORDS = {
    "right": "right",
    "error": "error",
    "hung": "**hangs**",
    "wrong": "**wrong numbers**",
    "unnamed": "**error without a cause**",
    "crash": "**error, then a crash**",
    "late": "**late error**",
    "mixed": "**some ranks end**",
}


def faults(record: Record) -> Table:
    """The outcome of each fault by method, and the seconds from the fault to each rank's error."""
    by_fault: dict[str, dict[str, Record]] = {}
    for trial in record["trials"]:
        by_fault.setdefault(trial["fault"], {})[trial["method"]] = trial
    methods = list(dict.fromkeys(trial["method"] for trial in record["trials"]))
    headings = ["fault", "ranks", *methods, f"seconds to the error, {' / '.join(methods)}"]
    rows = []
    for fault, trials in by_fault.items():
        found = [trials.get(method) for method in methods]
        outcomes = [_WORDS[trial["outcome"]] if trial else "" for trial in found]
        ranks = str(next(iter(trials.values()))["ranks"])
        rows.append([fault, ranks, *outcomes, " / ".join(map(_seconds, found))])
    return headings, rows


def _seconds(trial: Record | None) -> str:
    """The least and the most of all ranks."""
    times = sorted(trial["seconds_to_error"]) if trial else []
    if not times:
        return "-"
    first, last = f"{times[0]:.1f}", f"{times[-1]:.1f}"
    return first if first == last else f"{first} to {last}"
