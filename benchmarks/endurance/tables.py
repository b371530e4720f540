# SPDX-License-Identifier: BSD-3-Clause
"""The tables of docs/reliability.md that bench_restarts.py and bench_endurance.py make."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from text_tables import Table

from endurance import resources

Record = dict[str, Any]

# Bounds of the errors of a turn, relative to the sum of 500 mean gradients. Each step rounds M, the
# factors and the output once in float32. A residual in half precision is rounded at each step.
TOLERANCE, HALF_TOLERANCE = 1e-5, 2e-2
# Bounds of the growth of memory in bytes: 1 MB in 10,000 steps, and 20 kB for each group, of which
# plain Gloo's take 10.
GROWTH = {"steps": 100.0, "groups": 20_000.0}

_METHODS = {"ours": "`cpu:powersgd`", "gloo": "plain Gloo"}
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
    headings.append("newest checkpoints of the ranks differed")
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


def endurance_memory(record: Record) -> Table:
    """Memory, threads and files by the number of steps or groups, of ours and of plain Gloo."""
    headings = ["process", "memory after the warm-up, MB", "at the end, MB", "growth"]
    headings += ["threads", "beside them for callbacks", "files"]
    rows = []
    for part, per in (("steps", 10_000), ("groups", 100)):
        for method, title in _METHODS.items():
            for rank, run in enumerate(record["runs"].get(f"{method} {part}", [])):
                late = resources.after(run["samples"], record[f"{part}_warm_up"])
                growth = per * resources.slope(late) / 1e6
                counts = [_range(sample[field] for sample in late) for field in (2, 3, 4)]
                rows.append(
                    [
                        f"{title}, {record[part]:,} {part}, rank {rank}",
                        f"{late[0][1] / 1e6:.2f}",
                        f"{late[-1][1] / 1e6:.2f}",
                        f"{growth:+.3f} MB in {per:,} {part}",
                        *counts,
                    ]
                )
    return headings, rows


def endurance_turns(record: Record) -> Table:
    """The identity's errors of the turns, and over all steps."""
    headings = ["options of a turn", "turns", "largest error of the sums in a turn"]
    runs = record["runs"]["ours steps"]
    errors: dict[str, list[float]] = {}
    for turn in runs[0]["turns"]:
        errors.setdefault(turn["title"], []).append(turn["error"])
    rows = [[title, str(len(each)), f"{max(each):.1e}"] for title, each in errors.items()]
    rows.append(["all steps together", str(len(runs[0]["turns"])), f"{runs[0]['error']:.1e}"])
    return headings, rows


def of_endurance(record: Record) -> dict[str, Table]:
    """The tables of a record of bench_endurance.py, by their titles."""
    tables = {"memory, threads and files": endurance_memory(record)}
    if "ours steps" in record["runs"]:
        tables["sum of outputs + residual = sum of mean gradients"] = endurance_turns(record)
    return tables


def faults(record: Record, growth: Mapping[str, float] = GROWTH) -> list[str]:
    """Names the faults that a record of bench_endurance.py shows.

    Args:
        record: the record.
        growth: the bounds of the growth of memory, in bytes for each step or group.
    """
    found = []
    if "ours steps" in record["runs"]:
        first, *others = record["runs"]["ours steps"]
        if any(other["hashes"] != first["hashes"] for other in others):
            found.append("the ranks' parameters differ")
        for turn in first["turns"]:
            bound = HALF_TOLERANCE if "float16 residual" in turn["title"] else TOLERANCE
            if not turn["error"] < bound:  # it may be NaN
                found.append(f"{turn['title']}: the sums differ by {turn['error']:.1e}")
    for name, runs in record["runs"].items():
        method, part = name.split()
        for rank, run in enumerate(runs if method == "ours" else []):
            late = resources.after(run["samples"], record[f"{part}_warm_up"])
            found += [f"{name}, rank {rank}: {fault}" for fault in _growth(late, growth[part])]
    return found


def _growth(samples: Sequence[resources.Sample], bound: float) -> list[str]:
    """Names the memory that grows faster than the bound, and counts that grow between halves."""
    found = []
    slope = resources.slope(samples)
    if slope > bound:
        found.append(f"memory grows by {slope:.0f} bytes each")
    half = len(samples) // 2
    for field, name in ((2, "threads"), (4, "files")):
        early = max(sample[field] for sample in samples[:half])
        late = max(sample[field] for sample in samples[half:])
        if late > early:
            found.append(f"{late} {name} after {early}")
    return found


def _range(values: Iterable[int]) -> str:
    found = set(values)
    least, most = min(found), max(found)
    return str(least) if least == most else f"{least} to {most}"


TABLES: Sequence[Callable[..., Table]] = (
    restart_kills,
    restart_ends,
    endurance_memory,
    endurance_turns,
)
