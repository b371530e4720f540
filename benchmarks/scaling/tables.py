# SPDX-License-Identifier: BSD-3-Clause
"""The tables of docs/scaling.md, from a record of bench_scaling.py."""

from __future__ import annotations

from typing import Any

from report import Record, Table

from scaling.model import METHODS, WIRES

TITLES = {
    "plain": "plain all-reduce",
    "hook": "torch's PowerSGD hook, one bucket",
    **{wire: f"ours, {wire}" for wire in WIRES},
}


def sent_by_ranks(record: Record) -> Table:
    """The kB that a rank sends in a step: measured, and modeled for more ranks."""
    worlds, model = _worlds(record), record["model"]
    headings = ["method", *(f"{world} processes, kB" for world in worlds)]
    headings += [f"{world}, modeled" for world in model["counted_worlds"]]
    rows = []
    for method in METHODS:
        measured = [_run(record, world, method)["sent_bytes"] for world in worlds]
        sent = [*measured, *model["sent_bytes"][method]]
        rows.append([TITLES[method], *(f"{size / 1e3:,.0f}" for size in sent)])
    return headings, rows


def costs(record: Record) -> Table:
    """What each rank costs, and how exactly that was predicted."""
    headings = ["ranks", "method", "sent / modeled", "memory beyond plain, MB", "/ planned"]
    headings += ["threads", "sockets"]
    rows = []
    for run in record["runs"]:
        row = [str(run["world"]), TITLES[run["method"]]]
        row.append(f"{run['sent_bytes'] / run['predicted']['sent_bytes']:.4f}")
        if planned := run["predicted"].get("memory_bytes"):
            plain = _run(record, run["world"], "plain")
            beyond = run["memory_bytes"] - plain["memory_bytes"]
            row += [f"{beyond / 1e6:.1f}", f"{beyond / planned:.3f}"]
        else:
            row += ["", ""]
        rows.append([*row, str(run["threads"]), str(run["sockets"])])
    return headings, rows


def larger_groups(record: Record) -> Table:
    """Modeled milliseconds of a step's communication. The least of each link is bold."""
    model = record["model"]
    headings = ["link", "method", *(f"{world} processes" for world in model["timed_worlds"])]
    lines = model["milliseconds"]
    rows = []
    for line in lines:
        of_link = [other["ms"] for other in lines if other["gbit"] == line["gbit"]]
        least = [min(times) for times in zip(*of_link, strict=True)]
        one = ", one bucket" if line["one_bucket"] and line["method"] != "hook" else ""
        cells = [_bold(ms, ms == best) for ms, best in zip(line["ms"], least, strict=True)]
        rows.append([f"{line['gbit']:g} Gbit/s", TITLES[line["method"]] + one, *cells])
    return headings, rows


def several_devices(record: Record) -> Table:
    """The modeled bytes and milliseconds of hosts with several devices."""
    model = record["several_devices"]
    groups = [f"{hosts} x {model['devices']}" for hosts in model["hosts"]]
    headings = ["method", *(f"{group}: {what}" for group in groups for what in ("MB", "ms"))]
    rows = []
    for row in model["methods"]:
        pairs = zip(row["sent_bytes"], row["ms"], strict=True)
        figures = [figure for size, ms in pairs for figure in (size / 1e6, ms)]
        rows.append([row["method"], *(_bold(figure, False) for figure in figures)])
    return headings, rows


def _worlds(record: Record) -> list[int]:
    return sorted({run["world"] for run in record["runs"]})


def _run(record: Record, world: int, method: str) -> dict[str, Any]:
    runs = (run for run in record["runs"] if (run["world"], run["method"]) == (world, method))
    return next(runs)


def _bold(ms: float, is_least: bool) -> str:
    text = f"{ms:,.1f}" if ms < 10 else f"{ms:,.0f}"
    return f"**{text}**" if is_least else text
