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


def links(record: Record) -> Table:
    """Milliseconds of a step on each link, and megabytes sent by a host.

    Hosts of several ranks have the bytes in payloads as well.
    """
    settings = record["settings"]
    counts = {"sent per step, MB": ("tx_bytes_per_step", 1e6)}
    if any(setting.get("per_host", 1) > 1 for setting in settings):
        counts["payloads"] = ("payloads", 1)
    headings = ["method", *counts, *(f"{link(each)}, ms" for each in settings)]
    rows = [
        [record["titles"][method], *(_least(settings, method, *count) for count in counts.values())]
        + [_step(_without_quartiles(each["methods"].get(method, {}))) for each in settings]
        for method in _methods(record)
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
            seconds = [_seconds(each, steps) for each in figures]
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
    "step, ms": _step,
    "above none, ms": _number("above_none_ms", "{:+.0f}"),
    "payloads": _number("payloads", "{:.2f}"),
    "times fewer bytes": _number("times_fewer_bytes", "{:.1f}"),
    "peak, MB": _number("peak_memory_bytes", "{:.0f}", 1e-6),
    "beyond plain / gradient": _number("memory_beyond_plain_in_gradients", "{:+.2f}"),
    "failed attempts": lambda figures: str(len(figures["failures"]) or ""),
}


def costs(record: Record, setting: Record) -> Table:
    """A step on one link, and what each method adds. Columns without any figure are left out.

    "above none" is relative to a step without synchronization.
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


def by_model(record: Record) -> Table:
    """Milliseconds of a step, and those beyond the step without synchronization of the same run."""
    models: dict[str, Record] = {}
    for setting in record["settings"]:  # a method's first run is the one that counts
        models[setting["model"]] = {**setting["methods"], **models.get(setting["model"], {})}
    above = _COSTS["above none, ms"]
    rows = []
    for method in _methods(record):
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
        groups.setdefault(f"{setting['model']}, {figures_of.ranks(setting)}", []).append(setting)
    tables = {
        f"{title}: loss by step": by_step(record, losses)
        for title, losses in record.get("losses", {}).items()
    }
    for title, settings in groups.items():
        part = {**record, "settings": settings}
        tables[f"{title}: a step"] = links(part)
        tables[f"{title}: seconds to the loss of plain"] = learning(part)
        for setting in settings:
            tables[f"{figures_of.title(setting)}: what a method costs"] = costs(record, setting)
    return {title: table for title, table in tables.items() if table[1]}


def _methods(record: Record) -> list[str]:
    """The methods that ran on any link."""
    settings = record["settings"]
    return [name for name in record["titles"] if any(name in each["methods"] for each in settings)]


def _seconds(figures: Figures, steps: int) -> str:
    """The seconds to the target loss, with the speedup over plain."""
    seconds, sooner = figures.get("seconds_to_loss"), figures.get("times_sooner")
    if seconds is None:
        return f"not within {steps} steps"
    if not sooner or sooner == 1:  # plain itself, or a seed that never reaches the loss
        return f"{seconds:.1f}"
    return f"{seconds:.1f} ({sooner:.1f} times sooner)"


def _least(settings: Sequence[Record], method: str, name: str, unit: float) -> str:
    """The minimum over all links, since a slow link retransmits some packets."""
    found = [each["methods"].get(method, {}).get(name) for each in settings]
    least = min((sent for sent in found if sent is not None), default=0) / unit
    return "" if least < 1e-3 else f"{least:.2f}"
