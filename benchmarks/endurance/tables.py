# SPDX-License-Identifier: BSD-3-Clause
"""The tables of docs/reliability.md that bench_restarts.py and bench_endurance.py make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Record = dict[str, Any]
Table = tuple[list[str], list[list[str]]]

_FOUND = {
    "importing": "imports torch",
    "joining": "makes the process group",
    "attaching": "builds and attaches the model",
    "loading": "loads a checkpoint",
    "training": "trains",
    "saving": "writes a checkpoint",
    "leaving": "ends",
}


def restart_kills(record: Record) -> Table:
    """The kills, by what the rank did when it was killed."""
    headings = ["the killed rank", "kills", "of rank 0", "of rank 1", "left an unfinished file"]
    headings.append("left the ranks at different checkpoints")
    rows = []
    for word, title in _FOUND.items():
        found = [kill for kill in record["kills"] if kill["found"] == word]
        if found:
            ranks = [sum(kill["rank"] == rank for kill in found) for rank in (0, 1)]
            half = sum(kill["unfinished_bytes"] is not None for kill in found)
            apart = sum(len(set(kill["newest"])) > 1 for kill in found)
            cells = [str(count) if count else "" for count in (half, apart)]
            rows.append([title, str(len(found)), *map(str, ranks), *cells])
    return headings, rows


def restart_ends(record: Record) -> Table:
    """The ends of the quiet run and of the killed job, and whether their bits are equal."""
    headings = ["run", "kills", "failures beside the kills", "loss of rank 0", "of rank 1"]
    headings += ["parameters", "all losses, parameters and states"]
    rows = []
    for name, count in (("quiet", 0), ("killed", len(record["kills"]))):
        ends = record[name]
        equal = all(
            end[field] == quiet[field]
            for end, quiet in zip(ends, record["quiet"], strict=True)
            for field in ("losses", "parameters", "state")
        )
        rows.append(
            [
                {"quiet": "undisturbed", "killed": "killed"}[name],
                str(count),
                str(record[f"{name}_other_failures"]),
                *(f"{end['loss']:.9f}" for end in ends),
                " and ".join(sorted({end["parameters"] for end in ends})),
                "equal to the bit" if equal else "**differ**",
            ]
        )
    return headings, rows


def of_restarts(record: Record) -> dict[str, Table]:
    """The tables of a record of bench_restarts.py, by their titles."""
    return {"kills": restart_kills(record), "ends": restart_ends(record)}


TABLES: Sequence[Callable[..., Table]] = (restart_kills, restart_ends)
