# SPDX-License-Identifier: BSD-3-Clause
"""The tables of a record of bench_cluster.py, for its output and for docs/performance.md."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from report import Record, Table

from cluster import figures as figures_of

Figures = dict[str, Any]
Cell = Callable[[Figures], str]

_UNITS = {"k": "k", "m": "M", "g": "G"}


def link(setting: Record) -> str:
    """The link of a setting, with tc's rate in the usual notation."""
    return re.sub(r"([kmg])bit", lambda unit: f" {_UNITS[unit[1]]}bit/s", figures_of.link(setting))


def links(record: Record, without: Sequence[str] = ()) -> Table:
    """Milliseconds of a step on each link, with quartiles, and megabytes sent."""
    settings = record["settings"]
    headings = ["method", "sent per step, MB", *(f"{link(each)}, ms" for each in settings)]
    rows = [
        [record["titles"][method], _sent(settings, method)]
        + [_step(each["methods"].get(method, {})) for each in settings]
        for method in _methods(record)
        if method not in without
    ]
    return headings, rows


def learning(record: Record) -> Table:
    """The loss after the same number of steps, and the seconds to the target loss."""
    settings = record["settings"]
    steps, loss = settings[0]["learning_steps"], settings[0]["loss"]
    headings = ["method", f"loss after {steps} steps"]
    if loss is not None:
        headings += [f"seconds to a loss of {loss:.2f}, {link(each)}" for each in settings]
    rows = []
    for method in _methods(record):
        figures = [each["methods"].get(method, {}) for each in settings]
        if figures[0].get("final_loss") is not None:
            lasts = [each["marks"][-1] if each.get("marks") else {} for each in figures]
            seconds = [_seconds(last, f"not within {steps} steps") for last in lasts]
            final = f"{figures[0]['final_loss']:.3f}"
            rows.append([record["titles"][method], final, *(seconds if loss is not None else [])])
    return headings, rows


def by_step(record: Record, losses: dict[str, dict[str, list[float]]]) -> Table:
    """The loss of each method after each tenth of the steps, and at the end beyond plain's."""
    medians = {
        method: [statistics.median(each) if each else math.nan for each in of.values()]
        for method, of in losses.items()
    }
    rows = []
    for method, values in medians.items():
        beyond = values[-1] - medians.get("plain", [math.nan])[-1]
        rows.append([record["titles"][method], *map("{:.3f}".format, values), f"{beyond:+.3f}"])
    return ["method", *next(iter(losses.values())), "beyond plain's"], rows


def on_the_way(record: Record, rate: str = "1gbit") -> Table:
    """The seconds to plain's intermediate losses, and the speedup over plain."""
    setting = next(each for each in record["settings"] if each["rate"] == rate)
    steps = [round(share * setting["learning_steps"]) for share in setting["mark_shares"]]
    headings = ["method", *(f"seconds to plain's loss at step {step}" for step in steps)]
    rows = [
        [record["titles"][method], *(_seconds(mark, "not reached") for mark in figures["marks"])]
        for method, figures in setting["methods"].items()
        if figures.get("marks")
    ]
    return headings, rows


def _number(name: str, form: str, scale: float = 1) -> Cell:
    """A figure, with its quartiles where the record has them."""

    def cell(figures: Figures) -> str:
        if (value := figures.get(name)) is None:
            return ""
        quartiles = [form.format(scale * each) for each in figures.get(f"{name}_quartiles", [])]
        return form.format(scale * value) + (f" ({' to '.join(quartiles)})" if quartiles else "")

    return cell


_step = _number("step_ms", "{:.0f}")
_COSTS: dict[str, Cell] = {
    "above none, ms": _number("above_none_ms", "{:+.0f}"),
    "above DDP, ms": _number("above_ddp_alone_ms", "{:+.0f}"),
    "times fewer bytes": _number("times_fewer_bytes", "{:.1f}"),
    "peak, MB": _number("peak_memory_bytes", "{:.0f}", 1e-6),
    "beyond plain / gradient": _number("memory_beyond_plain_in_gradients", "{:+.2f}"),
    "failed attempts": lambda figures: str(len(figures["failures"]) or ""),
}


def costs(record: Record, setting: Record) -> Table:
    """What each method adds to a step on one link. Columns without any figure are left out.

    "above none" and "above DDP" are relative to a step without synchronization, of the bare model
    and of DDP.
    """
    rows = {
        method: {heading: cell(figures) for heading, cell in _COSTS.items()}
        for method, figures in setting["methods"].items()
    }
    headings = [name for name in _COSTS if any(cells[name] for cells in rows.values())]
    return ["method", *headings], [
        [record["titles"][method], *(cells[name] for name in headings)]
        for method, cells in rows.items()
    ]


def by_model(record: Record, without: Sequence[str] = ()) -> Table:
    """Milliseconds of a step, and those beyond the step without synchronization of the same run."""
    models: dict[str, Record] = {}
    for setting in record["settings"]:  # a method's first run is the one that counts
        models[setting["model"]] = {**setting["methods"], **models.get(setting["model"], {})}
    above = _COSTS["above none, ms"]
    rows = []
    for method in _methods(record):
        if method in without:
            continue
        found = [_without_quartiles(methods.get(method, {})) for methods in models.values()]
        cells = [f"{_step(each)} ({above(each)})" if above(each) else _step(each) for each in found]
        rows.append([record["titles"][method], *cells])
    return ["method", *(f"{model}, ms" for model in models)], rows


def _without_quartiles(figures: Figures) -> Figures:
    return {name: value for name, value in figures.items() if not name.endswith("_quartiles")}


def everything(record: Record) -> dict[str, Table]:
    """All tables that the record has figures for, by their titles."""
    groups: dict[str, list[Record]] = {}
    for setting in record["settings"]:
        groups.setdefault(f"{setting['model']}, {setting['ranks']} ranks", []).append(setting)
    tables = {
        f"{title}: loss by step": by_step(record, losses)
        for title, losses in record.get("losses", {}).items()
    }
    for title, settings in groups.items():
        part = {**record, "settings": settings}
        tables[f"{title}: a step"] = links(part)
        tables[f"{title}: seconds to the loss of plain"] = learning(part)
        if settings[0]["mark_shares"]:  # there are none if the loss is given
            tables[f"{title}: losses on the way"] = on_the_way(part, settings[0]["rate"])
        for setting in settings:
            tables[f"{figures_of.title(setting)}: what a method costs"] = costs(record, setting)
    return {title: table for title, table in tables.items() if table[1]}


def _methods(record: Record) -> list[str]:
    """The methods that ran on any link."""
    settings = record["settings"]
    return [name for name in record["titles"] if any(name in each["methods"] for each in settings)]


def _seconds(mark: Figures, never: str) -> str:
    """The seconds to a loss, with the speedup over plain."""
    seconds, sooner = mark.get("seconds_to_loss"), mark.get("times_sooner")
    if seconds is None:
        return never
    if not sooner or sooner == 1:  # plain itself, or a seed that never reaches the loss
        return f"{seconds:.1f}"
    return f"{seconds:.1f} ({sooner:.1f} times sooner)"


def _sent(settings: Sequence[Record], method: str) -> str:
    """The minimum over all links, since a slow link retransmits some packets."""
    found = [each["methods"].get(method, {}).get("tx_bytes_per_step") for each in settings]
    least = min((sent for sent in found if sent is not None), default=0)
    return "" if least < 1000 else f"{least / 1e6:.2f}"
