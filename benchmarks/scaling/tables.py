# SPDX-License-Identifier: BSD-3-Clause
"""The tables of docs/scaling.md, from a record of bench_scaling.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from report import Record, Table

from scaling.settings import METHODS, MODELS, TITLES, WIRES

Run = dict[str, Any]

_SHORT = {"gloo:all_reduce": "all-reduces", "gloo:send": "messages"}


def sent_by_ranks(record: Record, without: Sequence[str] = ()) -> Table:
    """The kB that a rank sends in a step: measured over modeled, and modeled for more ranks."""
    worlds = _worlds(record)
    model = record.get("model")
    headings = ["method", *(f"{world} processes, kB" for world in worlds)]
    headings += [f"{world}, modeled" for world in (model["counted_worlds"] if model else ())]
    rows = []
    for method in METHODS:
        runs = [_find(record, part="ranks", world=world, method=method) for world in worlds]
        if any(runs) and method not in without:
            cells = [_measured(run, "wire_bytes", 1e3) if run else "" for run in runs]
            modeled = model["sent_bytes"][method] if model else ()
            rows.append([TITLES[method], *cells, *(f"{sent / 1e3:,.0f}" for sent in modeled)])
    return headings, rows


def collectives(record: Record) -> Table:
    """The collectives of a step, by the number of ranks."""
    worlds = _worlds(record)
    rows = []
    for method in ("plain", *WIRES):
        runs = [_find(record, part="ranks", world=world, method=method) for world in worlds]
        if any(runs):
            rows.append([TITLES[method], *(_collectives(run) if run else "" for run in runs)])
    return ["method", *(f"{world} ranks" for world in worlds)], rows


def process(record: Record) -> Table:
    """The other costs of a rank, by the number of ranks: plain / int8."""
    headings = ["ranks", "sockets", "threads", "store, kB", "memory beyond plain, MB"]
    headings += ["checkpoint, MB", "init and attach, processor ms", "init and attach, s"]
    rows = []
    for world in _worlds(record):
        plain = _find(record, part="ranks", world=world, method="plain")
        ours = _find(record, part="ranks", world=world, method="int8")
        if plain is None or ours is None:
            continue
        both = (plain, ours)
        row = [str(world)]
        row += [" / ".join(str(each[name]) for each in both) for name in ("sockets", "threads")]
        row.append(" / ".join(f"{each['store_bytes'] / 1e3:.1f}" for each in both))
        row += [_beyond(ours, plain), _checkpoint(ours)]
        row.append(" / ".join(f"{1e3 * _start(each['processor_seconds']):.0f}" for each in both))
        row.append(" / ".join(f"{_start(each['seconds']):.1f}" for each in both))
        rows.append(row)
    return headings, rows


def parameters(record: Record) -> Table:
    """Memory, bytes and checkpoints by the size of the model, in int8 on two ranks."""
    headings = ["model", "gradients, MB", "residual, MB", "factors and buffers, MB"]
    headings += ["memory beyond plain, MB", "sent, kB", "fewer than plain", "checkpoint, MB"]
    headings += ["attach, processor ms", "stages, ms"]
    rows = []
    for plain, ours in _pairs(record, "parameters"):
        predicted = ours["predicted"]
        rows.append(
            [
                ours["model"] + (", bfloat16" if ours["dtype"] == "bfloat16" else ""),
                *(_mb(predicted[f"{name}_bytes"]) for name in ("gradient", "residual", "factor")),
                _beyond(ours, plain),
                _measured(ours, "wire_bytes", 1e3),
                f"{plain['wire_bytes'] / ours['wire_bytes']:.0f} x",
                _checkpoint(ours),
                f"{1e3 * ours['processor_seconds']['attach']:.0f}",
                f"{1e3 * ours['stage_seconds']:.0f}",
            ]
        )
    return headings, rows


def buckets(record: Record) -> Table:
    """Collectives and memory by the size of DDP's buckets, in int8 on two ranks."""
    headings = ["`bucket_cap_mb`", "buckets", "collectives, plain", "messages, int8"]
    headings += ["sent, kB", "tables and workspaces, MB", "memory beyond plain, MB"]
    rows = []
    for plain, ours in _pairs(record, "buckets"):
        rows.append(
            [
                str(ours["cap"]),
                str(ours["buckets"]),
                *(str(sum(each["collectives"].values())) for each in (plain, ours)),
                _measured(ours, "wire_bytes", 1e3),
                _mb(ours["predicted"]["kernel_bytes"]),
                _beyond(ours, plain),
            ]
        )
    return headings, rows


def chains(record: Record) -> Table:
    """The longest chains of messages, by the number of ranks."""
    found = record.get("hops", [])
    names = [name for name in (found[0] if found else ()) if name != "world"]
    return ["ranks", *names], [
        [str(each["world"]), *(f"{each[name]:.1f}" for name in names)] for each in found
    ]


def larger_groups(record: Record, model: str, without: Sequence[str] = ()) -> Table:
    """Modeled milliseconds of a step's communication. The least of each link is bold."""
    modeled = record["model"]
    name = model.replace("_", " ")
    headings = ["link", f"{name}: method", *(f"{w} processes" for w in modeled["timed_worlds"])]
    lines = [each for each in modeled["milliseconds"] if each["model"] == name]
    rows = []
    for gbit in dict.fromkeys(line["gbit"] for line in lines):
        of_link = [line for line in lines if line["gbit"] == gbit]
        least = [min(times) for times in zip(*(line["ms"] for line in of_link), strict=True)]
        for line in of_link:
            if line["method"] in without:
                continue
            one = ", one bucket" if line["one_bucket"] and line["method"] != "hook" else ""
            cells = [_bold(ms, ms == best) for ms, best in zip(line["ms"], least, strict=True)]
            rows.append([f"{gbit:g} Gbit/s", TITLES[line["method"]] + one, *cells])
    return headings, rows


def everything(record: Record) -> dict[str, Table]:
    """All tables that the record has figures for, by their titles."""
    tables = {
        "sent by a rank in a step (times the model's)": sent_by_ranks(record),
        "collectives in a step": collectives(record),
        "a rank of plain / of int8": process(record),
        "by parameters": parameters(record),
        "by buckets": buckets(record),
        "messages that follow each other": chains(record),
    }
    if "model" in record:
        for model in ("100 M", "1 B"):
            tables[f"modeled ms of communication, {model}"] = larger_groups(record, model)
    return {title: table for title, table in tables.items() if table[1]}


def _find(record: Record, **wanted: Any) -> Run | None:
    for run in record["runs"]:
        if all(run[name] == value for name, value in wanted.items()):
            found: Run = run
            return found
    return None


def _worlds(record: Record) -> list[int]:
    return sorted({run["world"] for run in record["runs"] if run["part"] == "ranks"})


def _pairs(record: Record, part: str) -> list[tuple[Run, Run]]:
    """The runs of plain and int8 on the same model and buckets."""
    pairs = []
    for ours in record["runs"]:
        if ours["part"] == part and ours["method"] == "int8":
            same = {name: ours[name] for name in ("part", "world", "model", "cap", "dtype")}
            plain = _find(record, method="plain", **same)
            if plain is not None:
                pairs.append((plain, ours))
    sizes = list(MODELS)
    return sorted(pairs, key=lambda pair: (sizes.index(pair[1]["model"]), pair[1]["cap"] or 0))


def _measured(run: Run, name: str, unit: float) -> str:
    """A measured figure, and its ratio to the predicted one."""
    return f"{run[name] / unit:,.0f} ({run[name] / run['predicted'][name]:.3f})"


def _beyond(ours: Run, plain: Run) -> str:
    """The memory beyond plain's, and its ratio to the predicted memory."""
    more = ours["memory_bytes"] - plain["memory_bytes"]
    return f"{_mb(more)} ({more / ours['predicted']['memory_bytes']:.3f})"


def _checkpoint(run: Run) -> str:
    names = ("mean_checkpoint_bytes", "rank_checkpoint_bytes")
    return " / ".join(_mb(run[name]) for name in names) if names[0] in run else "not measured"


def _collectives(run: Run) -> str:
    return ", ".join(f"{count} {_SHORT[name]}" for name, count in run["collectives"].items())


def _start(seconds: dict[str, float]) -> float:
    return seconds["init"] + seconds["attach"]


def _mb(size: float) -> str:
    return f"{size / 1e6:,.1f}" if size < 1e8 else f"{size / 1e6:,.0f}"


def _bold(ms: float, is_least: bool) -> str:
    text = f"{ms:,.1f}" if ms < 10 else f"{ms:,.0f}"
    return f"**{text}**" if is_least else text


TABLES: Sequence[Callable[..., Table]] = (
    sent_by_ranks,
    parameters,
    larger_groups,
)
