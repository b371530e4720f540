# SPDX-License-Identifier: BSD-3-Clause
"""The tables of docs/reliability.md, from bench_reliability.py and tests/python/other_suites."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from report import Record, Table

from reliability.resources import COUNTS

_BACKENDS = {
    "cpu:powersgd": "`cpu:powersgd`",
    "attached": "`cpu:powersgd`, attached",
}
_OUTCOMES = {
    "right": "right",
    "error": "error",
    "hung": "**hangs**",
    "wrong": "**wrong numbers**",
    "unnamed": "**error without a cause**",
    "crash": "**error, then a crash**",
    "late": "**late error**",
    "mixed": "**some ranks end**",
}
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
        outcomes = [_OUTCOMES[trial["outcome"]] if trial else "" for trial in found]
        ranks = str(next(iter(trials.values()))["ranks"])
        seconds = (_range(trial["seconds_to_error"] if trial else [], ".1f") for trial in found)
        rows.append([fault, ranks, *outcomes, " / ".join(seconds)])
    return headings, rows


def outcomes(record: Record) -> Table:
    """The same in short: one outcome where the methods have the same, and the seconds of ours."""
    _, rows = faults(record)
    short = []
    for fault, _, *found, seconds in rows:
        ends = found[:1] if len({*found}) == 1 else found
        ours = seconds.rpartition(" / ")[2]
        short.append([fault, " / ".join(ends), ours if ours != "-" else ""])
    return ["fault", "outcome", "seconds to the error"], short


def starts(record: Record) -> Table:
    """How the starts ended, by the number of ranks."""
    endings = ("finished", "failed", "hung", "ranks differ")
    rows = [
        [str(result["ranks"]), *(str(result["endings"].get(ending, 0)) for ending in endings)]
        + [str(result["results"])]
        for result in record["results"]
    ]
    return ["ranks", *endings, "different results"], rows


def restart_kills(record: Record) -> Table:
    """The kills, by what the process was doing."""
    headings = ["the killed rank", "kills", "of rank 0", "of rank 1", "left an unfinished file"]
    headings.append("newest checkpoints of the ranks differed")
    rows = []
    for word, title in _FOUND.items():
        if found := record["killed"]["kills"].get(word):
            counts = [str(found[name] or "") for name in ("unfinished_files", "newest_differ")]
            ranks = [sum(found["ranks"]), *found["ranks"]]
            rows.append([title, *map(str, ranks), *counts])
    return headings, rows


def restart_ends(record: Record) -> Table:
    """The results of the undisturbed run and the killed job, and whether they are bitwise equal."""
    headings = ["run", "kills", "failures beside the kills", "loss of rank 0", "of rank 1"]
    headings += ["parameters", "all losses, parameters and states"]
    rows = []
    quiet = record["quiet"]["ranks"]
    for name, title in (("quiet", "undisturbed"), ("killed", "killed")):
        ended = record[name]
        ranks = ended["ranks"]
        equal = all(
            rank[field] == other[field]
            for rank, other in zip(ranks, quiet, strict=True)
            for field in ("losses", "parameters", "state")
        )
        rows.append(
            [
                title,
                str(sum(sum(kill["ranks"]) for kill in ended["kills"].values())),
                str(ended["other_failures"]),
                *(rank["loss"] for rank in ranks),
                " and ".join(sorted({rank["parameters"] for rank in ranks})),
                "equal to the bit" if equal else "**differ**",
            ]
        )
    return headings, rows


def endurance_memory(record: Record) -> Table:
    """Memory, threads and files of this project and of plain Gloo."""
    headings = ["process", "memory after the warm-up, MB", "at the end, MB", "growth"]
    headings += ["threads", "beside them for callbacks", "files"]
    rows = []
    for part, per in (("steps", 10_000), ("groups", 100)):
        for method, title in _METHODS.items():
            for rank, run in enumerate(record["runs"].get(f"{method} {part}", [])):
                rows.append(
                    [
                        f"{title}, {record[part]:,} {part}, rank {rank}",
                        *(f"{held / 1e6:.2f}" for held in run["memory"]),
                        f"{per * run['growth'] / 1e6:+.3f} MB in {per:,} {part}",
                        *(_range(run[name], "d") for name in COUNTS),
                    ]
                )
    return headings, rows


def endurance_turns(record: Record) -> Table:
    """The errors of the sums, by turn and over all steps."""
    headings = ["options of a turn", "turns", "largest error of the sums in a turn"]
    run = record["runs"]["ours steps"][0]
    turns = run["turns"]
    rows = [[title, str(count), f"{error:.1e}"] for title, (count, error) in turns.items()]
    count = sum(count for count, _ in turns.values())
    rows.append(["all steps together", str(count), f"{run['error']:.1e}"])
    return headings, rows


def _range(values: Sequence[float], form: str) -> str:
    """The minimum and the maximum, if they differ."""
    if not values:
        return "-"
    least, most = f"{min(values):{form}}", f"{max(values):{form}}"
    return least if least == most else f"{least} to {most}"


def replicas(record: Record) -> Table:
    """The goodput and the loss of a torchft job whose replicas are killed."""
    headings = ["process group", "a kill every", "kills", "seconds", "goodput", "loss"]
    of = {"ours": "`ProcessGroupPowerSGD`", "gloo": "torchft's `ProcessGroupGloo`"}
    quiet = {row["method"]: row["seconds"] for row in record["results"] if not row["every"]}
    rows = [
        [
            of[row["method"]],
            f"{row['every']:g} s" if row["every"] else "never",
            str(row["kills"]),
            f"{row['seconds']:.0f}",
            f"{100 * quiet[row['method']] / row['seconds']:.0f} %" if row["every"] else "",
            f"{row['loss']:.3f}",
        ]
        for row in record["results"]
    ]
    return headings, rows


TABLES: Sequence[Callable[..., Table]] = (
    suites,
    outcomes,
    replicas,
)
