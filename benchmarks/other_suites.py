# SPDX-License-Identifier: BSD-3-Clause
"""The tables of docs/reliability.md about other people's tests.

The tests in tests/python/other_suites write their record.
"""

from __future__ import annotations

from typing import Any

from text_tables import Table

Record = dict[str, Any]

_BACKENDS = {
    "cpu:powersgd": "`cpu:powersgd`",
    "attached": "`cpu:powersgd`, every DDP module attached, exact steps",
}


def suites(record: Record) -> Table:
    """How many tests of each suite end as over gloo."""
    headings = ["suite", "backend", "ranks", "tests", "passed as with Gloo", "skipped as with Gloo"]
    headings += ["fail over Gloo", "differences"]
    rows = [
        [row["suite"], _BACKENDS[row["backend"]]]
        + [str(row[field]) for field in ("ranks", "tests", "passed", "skipped", "fail over gloo")]
        + [str(len(row["differences"]))]
        for row in record["rows"]
    ]
    return headings, rows


def suite_differences(record: Record) -> Table:
    """The tests that end otherwise than over gloo, by reason, and where they do."""
    found: dict[str, dict[str, list[str]]] = {}
    for row in record["rows"]:
        where = f"{'attached' if row['backend'] == 'attached' else 'plain'}, {row['ranks']} ranks"
        for name, reason in row["differences"].items():
            found.setdefault(reason, {}).setdefault(name, []).append(where)
    rows = [
        [f"`{name}`", reason, "all" if len(places) == 4 else "; ".join(places)]
        for reason, names in found.items()
        for name, places in names.items()
    ]
    return ["test", "reason", "where"], rows


TABLES = (suites, suite_differences)
